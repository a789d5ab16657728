"""What PPO computes beside GRPO's loss.

kl           KL penalty per token and its coefficient
score        rules and reward models become one score per completion
advantages   rewards per token, advantages and returns, whitening
value_loss   the critic's loss
"""
