"""Worker of test_refusals: the GRPO script where DeepSpeed is not installed."""

from transformers import dependency_versions_check

from trl_ext.scripts import grpo

if __name__ == "__main__":
    dependency_versions_check.deps["deepspeed"] = "deepspeed-that-is-not-there"
    grpo.main()
