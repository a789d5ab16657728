"""Keys of a recipe that map rows of the dataset to prompts and answers; TRL's keys name the dataset."""

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
        "Names of the dataset's columns, by the name that trl_ext uses: {prompt: question, answer: solution}. A "
        "dotted name reads a value inside a column: reward_model.ground_truth, messages.:-1, messages.0.content. null "
        "drops a column. Other columns keep their names. For pairs, better: names the column that gives "
        "the better side.",
    )
    answer_pattern: str | None = setting(
        None,
        "Regular expression that reads the answer from the column `answer`: the text of its one group. GSM8K: '#### "
        "(.+)'. Unset: the whole text.",
    )
    first_option: int | None = setting(
        None,
        "Number of the first option, if the column `answer` holds option numbers; they become letters. MMLU: 0. "
        "Unset: the column is used as it is.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):  # from the command line
            try:
                self.columns = yaml.safe_load(self.columns)
            except yaml.YAMLError:
                raise ConfigError(f"columns: {self.columns} is no mapping, such as {{prompt: question}}.") from None
        self.mapping()

    def mapping(self) -> RowMapping:
        """Return the mapping of these keys; raise ConfigError for a key that cannot work with any data."""
        return RowMapping.of(self)


@dataclass
class PromptArguments(DataArguments):
    """The dataset, its columns, and the prompts that are made from them."""

    system_prompt: str | None = setting(
        None, "System message before each prompt. Text prompts then become user messages."
    )
    prompt_template: str | None = setting(
        None,
        "Text of the prompt, with the dataset's columns in braces: \"{question}\\nLet's think step by step.\" Double "
        "other braces: \\boxed{{}}.",
    )
    prompt_format: Literal["chat", "text"] | None = setting(
        None,
        "chat: a text prompt becomes a user message, and the model's chat template is applied. text: the model reads "
        "the text as it is. Unset: chat if the recipe makes the prompt (by system_prompt, prompt_template or columns) "
        "and the tokenizer has a chat template; otherwise the dataset's own form.",
    )
