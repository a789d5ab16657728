"""The keys of a recipe that say how rows of the data become prompts and answers; TRL's name the data themselves."""

from dataclasses import dataclass
from typing import Literal

import yaml
from trl import ScriptArguments

from trl_ext.errors import ConfigError
from trl_ext.scripts.data.mapping import RowMapping
from trl_ext.trainers.settings.values import setting


@dataclass
class DataArguments(ScriptArguments):
    """The dataset (from TRL), and its columns."""

    columns: dict | str | None = setting(
        None,
        "Columns by our name, with the data's: {prompt: question, answer: solution}. A dotted name is a value within "
        "a column: reward_model.ground_truth, messages.:-1, messages.0.content. With null as the data's name, a "
        "column is left out. Other columns keep their names.",
    )
    answer_pattern: str | None = setting(
        None,
        "Regular expression with one group: what it finds in the column `answer` becomes the answer. GSM8K: '#### "
        "(.+)'.",
    )
    first_option: int | None = setting(
        None,
        "Number of the first option, where the column `answer` counts options, from which it becomes the option's "
        "letter. MMLU: 0.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):  # from the command line
            try:
                self.columns = yaml.safe_load(self.columns)
            except yaml.YAMLError:
                raise ConfigError(f"columns: {self.columns} is no mapping, such as {{prompt: question}}.") from None
        self.mapping()

    def mapping(self) -> RowMapping:
        """Return what these keys do to a row.

        Raises:
            ConfigError: A key that cannot work, whatever the data hold.
        """
        return RowMapping.of(self)


@dataclass
class PromptArguments(DataArguments):
    """The dataset, its columns, and the prompts that are made of them."""

    system_prompt: str | None = setting(
        None, "System message in front of each prompt. Makes prompts that are text user messages."
    )
    prompt_template: str | None = setting(
        None,
        "The prompt around the data's columns, in braces: \"{question}\\nLet's think step by step.\" Doubled braces "
        "stay: \\boxed{{}}.",
    )
    prompt_format: Literal["chat", "text"] | None = setting(
        None,
        "chat: a prompt that is text becomes a user message, which the model's chat template renders. text: the "
        "model reads it as it is. Unset: chat where the recipe makes the prompt (by system_prompt, prompt_template "
        "or columns) and the model's tokenizer has a chat template; else as the data have it.",
    )
