"""Tokens of the hub, which training uses and no file may hold."""

from typing import Any


class Token(str):
    """A token that is None wherever it is pickled, as into `training_args.bin`; plain Python reads that."""

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[()]]:
        return type(None), ()

    # Copied by pickling's means, it would be None in this process, too.

    def __copy__(self) -> "Token":
        return self

    def __deepcopy__(self, memo: Any) -> "Token":
        return self


def guard_tokens(args: Any) -> None:
    """Let the tokens of training arguments stay out of what is pickled."""
    if isinstance(args.hub_token, str):
        args.hub_token = Token(args.hub_token)
    options = getattr(args, "model_init_kwargs", None)
    if isinstance(options, dict) and isinstance(options.get("token"), str):
        options["token"] = Token(options["token"])
