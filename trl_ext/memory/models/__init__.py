"""The shapes of models, from a name, a size or a `config.json`."""
