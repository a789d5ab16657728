"""The setting `resume_despite`, which our configs share."""

from dataclasses import dataclass, field

from trl_ext.errors import ConfigError

# What a checkpoint is compared in, and "manifest": that it is whole, as its manifest says.
DESPITE = ("manifest", "model", "rules", "rewards", "data", "processes", "seed", "settings")


@dataclass
class ResumeFields:
    """A field beside those of TRL's config."""

    resume_despite: list[str] | None = field(
        default=None,
        metadata={
            "help": "Differences between the run and the checkpoint with which to resume all the same: "
            "model, rules, rewards, data, processes, seed, settings; manifest for a checkpoint not known to be whole, "
            "such as one of TRL's own trainers."
        },
    )

    def check_resume_fields(self) -> None:
        """Make a list of one name; raise ConfigError for a name that is none of `DESPITE`."""
        if isinstance(self.resume_despite, str):  # as YAML gives a single one
            self.resume_despite = self.resume_despite.replace(",", " ").split()
        unknown = [name for name in self.resume_despite or () if name not in DESPITE]
        if unknown:
            raise ConfigError(f"resume_despite names {unknown[0]!r}. Use one or more of: {', '.join(DESPITE)}.")
