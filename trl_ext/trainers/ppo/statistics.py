"""The numbers that follow PPO's episodes, in a checkpoint: KL coefficient, moments of scores, scale of values."""

from dataclasses import dataclass
from typing import Any

from trl_ext.trainers.generation.parts import RolloutPart
from trl_ext.trainers.generation.trainer import RolloutTrainer
from trl_ext.trainers.ppo.critic.critics import Critic
from trl_ext.trainers.ppo.critic.files import read_state, write_state
from trl_ext.trainers.ppo.critic.scale import ValueScale
from trl_ext.trainers.ppo.objective.equations import AdaptiveKL
from trl_ext.trainers.ppo.scores.combine import Scoring


@dataclass(eq=False)
class RunningStatistics(RolloutPart):
    """Saves and loads the numbers that follow the episodes.

    Args:
        kl: The KL coefficient.
        scoring: Has the moments of reward models' scores.
        scale: The scale on which the critic predicts.
        critic: The ratio of its learning rate to the actor's is saved, too.
    """

    kl: AdaptiveKL
    scoring: Scoring
    scale: ValueScale
    critic: Critic

    def save(self, trainer: RolloutTrainer, folder: str) -> None:
        """Write the numbers, on process 0."""
        if trainer.args.should_save:
            state: dict[str, Any] = {"kl": self.kl.state_dict(), "scores": self.scoring.state_dict()}
            state |= {"values": self.scale.state_dict(), "rate_ratio": self.critic.rate_ratio}
            write_state(folder, state)

    def load(self, trainer: RolloutTrainer, checkpoint: str) -> None:
        """Go on with the numbers of a checkpoint; ConfigError if it has none."""
        state = read_state(checkpoint)
        self.kl.load_state_dict(state["kl"])
        self.scoring.load_state_dict(state["scores"])
        self.scale.load_state_dict(state["values"])
