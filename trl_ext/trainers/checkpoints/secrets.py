"""Secrets in training arguments: training uses them, but files, trackers and messages must not contain them."""

from dataclasses import fields
from typing import Any

from trl_ext.rewards.text.secrets import is_secret, public

_LIBRARIES = ("accelerate", "transformers")


class Secret(str):
    """A text that is pickled without its secrets, for example into `training_args.bin`."""

    shown: str | None  # the text without secrets; None if the whole text is a secret

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[Any, ...]]:
        return (type(None), ()) if self.shown is None else (str, (self.shown,))

    # By default, copies use __reduce_ex__ and would lose the secret in this process, too.

    def __copy__(self) -> "Secret":
        return self

    def __deepcopy__(self, memo: Any) -> "Secret":
        return self


class PublicArguments:
    """Mixed into training arguments: their dictionary and text, for trackers and messages, have no secrets."""

    def to_dict(self) -> dict[str, Any]:
        """Overrides transformers.TrainingArguments.to_dict, which hides no tokens inside mappings."""
        given = super().to_dict()  # type: ignore[misc]  # of transformers' class
        return given | public(given)

    def __repr__(self) -> str:
        shown = public({field.name: getattr(self, field.name) for field in fields(self)})  # type: ignore[arg-type]
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(shown.items()))
        return f"{type(self).__name__}(\n{lines})"

    __str__ = __repr__


def guard_secrets(holder: Any, seen: set[int], *, hides_all: bool = False) -> None:
    """Keep secrets out of pickles: replace secret texts in a dictionary or list in place, at every depth.

    With `hides_all` all of its texts are secret; `seen` has the ids of what was looked at.
    """
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        hide = hides_all or (isinstance(key, str) and is_secret(key, value))
        if type(value) is str and (shown := None if hide else public(value)) != value:
            holder[key] = Secret(value)
            holder[key].shown = shown
        elif isinstance(value, (dict, list)):
            guard_secrets(value, seen, hides_all=hide)
        elif type(value).__module__.startswith(_LIBRARIES) and hasattr(value, "__dict__"):  # DeepSpeed's config
            guard_secrets(vars(value), seen)
