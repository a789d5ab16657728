"""GRPO with a vLLM server: one GPU generates, the other trains. Qwen2.5-1.5B-Instruct learns GSM8K.

    CUDA_VISIBLE_DEVICES=1 trl vllm-serve --model Qwen/Qwen2.5-1.5B-Instruct      # in a first shell
    CUDA_VISIBLE_DEVICES=0 python examples/grpo_vllm_server.py                    # in a second one

Needs `pip install 'trl_ext[vllm]'`. With `--generation_ahead 1` the server generates while the other GPU trains.
docs/running/vllm.md describes several servers, and `--vllm_servers N`, which starts them for you.
"""

from dataclasses import dataclass

from datasets import load_dataset
from trl import TrlParser

from trl_ext import GRPOConfig, GRPOTrainer, RuleSet
from trl_ext.rewards import Answer

SYSTEM = 'Reason step by step. End with "The answer is" and the number.'


@dataclass
class Arguments:
    model: str = "Qwen/Qwen2.5-1.5B-Instruct"  # the server's


def to_row(row):
    """Make a prompt of a question; the answer follows `####` in the solution."""
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]
    return {"prompt": prompt, "answer": row["answer"].split("####")[1].strip()}


if __name__ == "__main__":
    parser = TrlParser((Arguments, GRPOConfig))
    parser.set_defaults(
        output_dir="out/grpo_vllm_server",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url="http://127.0.0.1:8000",  # several: addresses with commas between them
        learning_rate=1e-6,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,  # 64 completions an optimizer step
        num_generations=8,  # completions a prompt
        max_completion_length=512,  # tokens
        max_steps=200,
    )
    arguments, config = parser.parse_args_and_config()
    dataset = load_dataset("openai/gsm8k", "main", split="train").map(to_row, remove_columns="question")
    rules = RuleSet([Answer(gold="answer", kind="number")])
    trainer = GRPOTrainer(arguments.model, rules, config, dataset)
    trainer.train()
    trainer.save_model()
