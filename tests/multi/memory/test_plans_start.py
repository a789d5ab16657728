"""Every plan that we print starts: written, launched by the printed line, one optimizer step.

The models are made tiny and the CPU is forced. What needs a card is switched off on the command line, and nothing
else: see `OVERRIDES`.
"""

import json
import os
import re
import shlex

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.multi.launching import skip_what_cannot_run, succeeded
from tests.multi.warm import warm_python
from trl_ext.cli.plan.command import plan
from trl_ext.memory.planner.presets import PRESETS

NUM_ROWS = 64  # an optimizer step of every plan here
IS_THOROUGH = os.environ.get("TRL_EXT_THOROUGH") == "1"  # all of them; some minutes
# Launched in every test run: each trainer; with and without DeepSpeed, on one process and on two.
ALWAYS_LAUNCHED = ("reward, DDP, 2", "grpo, QLoRA, 1", "ppo, all weights, 2")
# One step, on the CPU, without a tracker or a checkpoint.
ALWAYS = "--use_cpu true --max_steps 1 --report_to none --save_strategy no".split()
# By a key of the recipe, what stands against it on the command line, for it needs a card. Without 4 bits, and with
# checkpoints on the card, a run is no longer the plan's, and names the plan's cards instead.
OVERRIDES = {
    "use_vllm": "--use_vllm false",
    "load_in_4bit": "--load_in_4bit false --use_bnb_nested_quant false --memory {cards}",
    "activation_offloading": "--activation_offloading false --memory {cards}",
}
FREE = {
    "reward, DDP, 2": "reward --model Qwen/Qwen2.5-0.5B --gpus 2xA100-80GB --zero_stage 0",
    "reward, optimizer in host memory, 1": "reward --model 7B --gpus 1xA100-80GB",
    "reward, checkpoints in host memory, 1": "reward --model 8B --gpus 1xA40 --method lora --activation_offloading",
    "reward, bounded forwards, ZeRO-1, 2": "reward --model 3B --gpus 2xA100-80GB --zero_stage 1 "
    "--max_tokens_per_forward 4096",
    "grpo, every 2nd layer, ZeRO-2, 2": "grpo --model 7B --gpus 2xH200 --zero_stage 2 --checkpoint_every 2",
    "grpo, every 4th layer, DDP, 1": "grpo --model Qwen/Qwen2.5-1.5B --gpus 1xH100-80GB --checkpoint_every 4",
    "grpo, ZeRO-3, 2": "grpo --model meta-llama/Llama-3.2-3B --gpus 2xA100-80GB --zero_stage 3",
    "grpo, shared rows, ZeRO-3, 2": "grpo --model 8B --gpus 2xH200 --zero_stage 3 --sequence_parallel 2",
    "reward, shared rows, ZeRO-2, 2": "reward --model 3B --gpus 2xA100-80GB --zero_stage 2 --sequence_parallel 2",
    "grpo, all in host memory, 1": "grpo --model Qwen/Qwen2.5-7B --gpus 1xA100-80GB --zero_stage 3 --offload all",
    "grpo, LoRA with ZeRO-3, every 2nd layer, 2": "grpo --model 14B --gpus 2xA100-80GB --method lora --zero_stage 3 "
    "--checkpoint_every 2",
    "grpo, QLoRA, 1": "grpo --model Qwen/Qwen3-8B --gpus 1x4090 --method qlora",
    "grpo, vLLM, 1": "grpo --model Qwen/Qwen2.5-1.5B --gpus 1xA100-80GB --use_vllm",
    "ppo, all weights, 2": "ppo --model Qwen/Qwen2.5-1.5B --gpus 2xA100-80GB --critic separate --reward_model copy "
    "--zero_stage 2",
    "ppo, LoRA, 1": "ppo --model 8B --gpus 1xA40 --method lora --reward_model adapter",
}
QUESTIONS = {name: f"--preset {name}" for name in PRESETS} | {k: f"--trainer {v}" for k, v in FREE.items()}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """What a user of a plan brings, tiny: model, reward model, reward adapter, rules, prompts, pairs."""
    folder = tmp_path_factory.mktemp("assets")
    words = ["<pad>", "<eos>", "<bos>", *(f"w{i}" for i in range(61))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32768)
    ids = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    policy = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids))
    # Nearly always ends at once, however long completions may become: one channel is large for every token.
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 2.0
        policy.lm_head.weight[1, 0] = 2.0
    policy.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    scorer.save_pretrained(folder / "scorer")
    fast.save_pretrained(folder / "scorer")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    get_peft_model(scorer, lora).save_pretrained(folder / "adapter")
    (folder / "rules.yaml").write_text("rules:\n  - {rule: length, high: 4, slack: 4}\n")
    prompts = [{"prompt": f"w{i % 60} w3"} for i in range(NUM_ROWS)]
    pairs = [{**row, "chosen": " w5 w6", "rejected": f" w{i % 60}"} for i, row in enumerate(prompts)]
    for name, rows in {"prompts": prompts, "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def printed_launch(question, folder, capsys):
    """Ask, write the plan into `folder`, and return the launch line that is printed."""
    assert plan([*question.split(), "--write", str(folder)]) == 0
    return re.search(r"^launch\n +(.*)$", capsys.readouterr().out, re.M)[1]


@pytest.mark.parametrize("name", QUESTIONS if IS_THOROUGH else ALWAYS_LAUNCHED)
def test_the_printed_line_reaches_step_1(name, assets, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = printed_launch(QUESTIONS[name], "plan", capsys)
    recipe = yaml.safe_load((tmp_path / "plan" / "recipe.yaml").read_text())
    machine = json.loads((tmp_path / "plan" / "plan.json").read_text())["hardware"]
    cards = f"{machine['num_gpus']}x{machine['card']}"
    if "deepspeed" in recipe:
        offloads = "offload_optimizer" in (tmp_path / "plan" / "deepspeed.json").read_text()
        skip_what_cannot_run("zero3_offload" if offloads else "zero3")
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = words[len(variables) :]
    assert words[0] == "trl-ext"
    given = {"DATASET": str(assets / ("pairs.jsonl" if words[1] == "reward" else "prompts.jsonl")), "OUT": "out"}
    given |= {"RULES.yaml": str(assets / "rules.yaml"), "ADAPTER": str(assets / "adapter")}
    given |= {"REWARD_MODEL": str(assets / "scorer"), "MODEL": str(assets / "model")}
    command = [given.get(word, word) for word in words[1:]]
    command += [*ALWAYS, "--model_name_or_path", str(assets / "model")]
    if "value_model" in recipe:
        command += ["--value_model", str(assets / "model")]
    for key, override in OVERRIDES.items():
        command += override.format(cards=cards).split() if recipe.get(key) else []
    succeeded([warm_python(), "-m", "trl_ext.cli.main", *command, "--main_process_port", 0], tmp_path, **variables)
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 1
