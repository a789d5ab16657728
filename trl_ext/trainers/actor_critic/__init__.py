"""What PPO has beside GRPO.

roles             several LoRA adapters on one backbone, and the pin that keeps them apart under checkpointing
value_head        values inside the model's own forward
critics           the three critics: adapter, head, separate
critic_files      the critic on disk, loadable by plain transformers and PEFT
reference         the model that the KL is measured from
reward_models     a frozen reward model that scores completions in forwards of bounded tokens
sequence_scores   its forwards: planned, packed or padded
reward_adapter    a LoRA reward model loaded as one more adapter of the policy
shared_reward     scores by that adapter
scoring           which of rules and reward models is asked about which completion
score             rules and reward models become one score per completion
kl                KL penalty per token and its coefficient
advantages        rewards per token, advantages and returns, whitening
value_loss        the critic's loss
"""
