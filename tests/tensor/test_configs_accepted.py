"""accelerate and DeepSpeed accept every launch file that we ship, and read the same from both families."""

import os

import pytest

from tests.configs import YAMLS, ZERO, read_json, read_yaml

# What an accelerate file cannot say, so that only the DeepSpeed files do: ZeRO-3 in smaller pieces. The bucket sizes
# are theirs alone, too; they are "auto" until the Trainer knows the model.
ONLY_IN_JSON = {"max_live_parameters", "max_reuse_distance", "sub_group_size"}
# What `accelerate launch` reads, and DeepSpeed does not get: how processes start on several machines.
OF_THE_LAUNCHER = {"deepspeed_multinode_launcher"}


@pytest.mark.parametrize("name", YAMLS)
def test_accelerate_loads_every_yaml(name):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(YAMLS[name]))
    kind = {"single_gpu": "NO", "multi_gpu": "MULTI_GPU", "cpu": "MULTI_GPU"}.get(name, "DEEPSPEED")
    kind = "FSDP" if name.startswith("fsdp") else kind
    assert config.distributed_type.value == kind


@pytest.mark.parametrize("name", [name for name in YAMLS if name.startswith(("zero", "fsdp"))])
def test_accelerates_launcher_knows_every_key_of_the_engine(name):
    # accelerate takes over any key under deepspeed_config and reads only those it knows: a typo would do nothing.
    launch = pytest.importorskip("accelerate.commands.launch")
    known = vars(launch.launch_command_parser().parse_args(["train.py"]))
    settings = read_yaml(name)
    assert (settings.get("deepspeed_config") or settings["fsdp_config"]).keys() <= known.keys()


@pytest.mark.parametrize("name", YAMLS)
def test_a_forgotten_num_processes_is_an_error(name):
    launch = pytest.importorskip("accelerate.commands.launch")
    args = launch.launch_command_parser().parse_args(["--config_file", str(YAMLS[name]), "train.py"])
    if name == "single_gpu":
        assert launch._validate_launch_command(args)[0].num_processes == 1
    else:
        with pytest.raises(ValueError, match="num_processes"):
            launch._validate_launch_command(args)


@pytest.mark.parametrize("name", ZERO)
def test_deepspeed_builds_the_same_engine_from_both(name, monkeypatch):
    zero_config = pytest.importorskip("deepspeed.runtime.zero.config")
    from accelerate.utils import DeepSpeedPlugin

    for variable in [v for v in os.environ if v.startswith("ACCELERATE_")]:
        monkeypatch.delenv(variable)
    keys = {key: v for key, v in read_yaml(name)["deepspeed_config"].items() if key not in OF_THE_LAUNCHER}
    inline = DeepSpeedPlugin(**keys).deepspeed_config["zero_optimization"]
    from_yaml = zero_config.DeepSpeedZeroConfig(**inline)
    # DeepSpeed refuses unknown keys here, so this line checks every key of the JSON as well.
    from_json = zero_config.DeepSpeedZeroConfig(**read_json(name)["zero_optimization"])
    assert set(differences(from_yaml.model_dump(), from_json.model_dump())) <= ONLY_IN_JSON


def differences(left, right, prefix=""):
    for key in left:
        one, other = (on_or_none(side[key]) for side in (left, right))
        if isinstance(one, dict) and isinstance(other, dict):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}"


def on_or_none(value):
    """An offload block with device "none" means the same as no block."""
    return None if isinstance(value, dict) and value.get("device") == "none" else value
