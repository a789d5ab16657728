"""Secrets in training arguments, which training uses and no file, tracker or message may hold."""

from dataclasses import fields
from typing import Any

from trl_ext.rewards.text.secrets import names_secret, public

_LIBRARIES = ("accelerate", "transformers")


class Secret(str):
    """A text that is another one, without its secrets, wherever it is pickled, as into `training_args.bin`.

    Attributes:
        shown: That other one; None for a text that is a secret as a whole.
    """

    shown: str | None

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[Any, ...]]:
        return (type(None), ()) if self.shown is None else (str, (self.shown,))

    # Copied by pickling's means, it would be the other one in this process, too.

    def __copy__(self) -> "Secret":
        return self

    def __deepcopy__(self, memo: Any) -> "Secret":
        return self


class PublicArguments:
    """Mixed into training arguments: trackers and messages, which ask for a dictionary or a text, get no secrets."""

    def to_dict(self) -> dict[str, Any]:
        """Overrides transformers.TrainingArguments.to_dict, which hides tokens outside of mappings only."""
        given = super().to_dict()  # type: ignore[misc]  # beside transformers' class
        return given | public(given)

    def __repr__(self) -> str:
        shown = public({field.name: getattr(self, field.name) for field in fields(self)})  # type: ignore[arg-type]
        lines = "".join(f"{name}={value!r},\n" for name, value in sorted(shown.items()))
        return f"{type(self).__name__}(\n{lines})"

    __str__ = __repr__


def guard_secrets(args: Any) -> None:
    """Let the secrets of training arguments, at every depth, stay out of what is pickled."""
    _guard(vars(args), set())


def _guard(holder: Any, seen: set[int], *, is_secret: bool = False) -> None:
    """Replace the secret texts of a dictionary or list in place; in all of its texts where it is secret as a whole."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        hide = is_secret or (isinstance(key, str) and names_secret(key))
        if type(value) is str and (shown := None if hide else public(value)) != value:
            holder[key] = Secret(value)
            holder[key].shown = shown
        elif isinstance(value, (dict, list)):
            _guard(value, seen, is_secret=hide)
        elif type(value).__module__.startswith(_LIBRARIES) and hasattr(value, "__dict__"):  # DeepSpeed's config
            _guard(vars(value), seen)
