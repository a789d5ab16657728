from tests.multi.conftest import tiny_model, tiny_reward_model  # noqa: F401
