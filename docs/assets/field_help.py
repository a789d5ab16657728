"""Let the API page show the `help` of a config's fields, which the command line shows as well."""

import ast
from typing import Any

import griffe


class FieldHelp(griffe.Extension):
    """Take `metadata={"help": ...}` of a dataclass field as its docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Called by griffe for every attribute that it reads."""
        for node in ast.walk(ast.parse(str(attr.value or "None"), mode="eval")):
            if isinstance(node, ast.Dict) and attr.docstring is None:
                for key, text in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "help":
                        attr.docstring = griffe.Docstring(ast.literal_eval(text), parent=attr)
