"""AsyncGRPOTrainer: TRL's, on any device, with a record, a report and an ending as all trainers here have them."""
