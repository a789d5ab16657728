"""Start a training script as workers of Ray Train, with the recipe and launch file of an accelerate run.

Ray places the workers, joins them in a process group and restarts them if one dies. A worker calls the script's `main`
in the environment that `accelerate launch` would set. A restarted run resumes from the newest complete checkpoint in
`output_dir`, which all workers must be able to read.
"""

import json
import logging
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from transformers.hf_argparser import string_to_bool

from trl_ext.errors import CANNOT_SAVE, SAVED_ON_SIGNAL, ConfigError, SupportError
from trl_ext.launch.accelerate import content_of, launch_arguments, refuse, without
from trl_ext.launch.servers import FLAG
from trl_ext.scripts.arguments import StrictParser
from trl_ext.scripts.exit import OUT_OF_MEMORY, USER_ERROR, refusals
from trl_ext.scripts.process import has_address_of_its_own, interface_of

CHECKPOINT = "checkpoint"  # transformers' PREFIX_CHECKPOINT_DIR
# Exit codes after which Ray must not try again: the script printed a reason, or was asked to end.
_FINAL = (0, USER_ERROR, OUT_OF_MEMORY, CANNOT_SAVE, SAVED_ON_SIGNAL)
_ATTEMPT_FAILED = 1
# Environment variables of accelerate that Ray sets instead.
_RAYS = frozenset("MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK".split())
_ACCELERATES = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")


def ray_parser() -> ArgumentParser:
    """Return the parser of the options of `--launcher ray`."""
    parser = ArgumentParser(prog="trl-ext", add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--num_workers", type=int, default=1, help="Training processes, on all machines (default 1).")
    purpose = "Resources that Ray reserves for each process (default: '{GPU: 1, CPU: 1}')."
    parser.add_argument("--resources_per_worker", help=purpose)
    waits = "Wait for machines that the cluster's autoscaler starts, instead of an error (default false)."
    parser.add_argument("--autoscaling", type=string_to_bool, nargs="?", const=True, default=False, help=waits)
    purpose = "Address of the cluster (default: RAY_ADDRESS, else a cluster that is started on this machine)."
    parser.add_argument("--address", help=purpose)
    purpose = "Where Ray stores the state of the run: a folder that all machines can read, or s3://..."
    parser.add_argument("--storage_path", help=purpose)
    purpose = "How many times a failed run is started again, from its newest checkpoint (default 0)."
    parser.add_argument("--max_failures", type=int, default=0, help=purpose)
    return parser


def launch(module: str, parser: StrictParser, argv: Sequence[str]) -> int:
    """Run `module` as workers of Ray Train, wait for them, and return the script's exit code.

    `argv` has arguments of the script, of `ray_parser` and of `accelerate launch`, in any order.
    """
    from ray.train import TrainingFailedError

    try:
        result = fit(module, parser, argv)
    except TrainingFailedError as error:
        words = str(error).strip().splitlines()
        print(f"\nerror: the run failed under Ray: {words[-1] if words else error}\n", file=sys.stderr)
        return _ATTEMPT_FAILED
    return int(result.return_value or 0)


def fit(module: str, parser: StrictParser, argv: Sequence[str]) -> Any:
    """Run `module` as `launch` does, and return Ray's `Result`; its `return_value` is the script's exit code.

    Raises:
        ConfigError, SupportError: The run cannot start.
        ray.train.TrainingFailedError: It failed more than `--max_failures` times.
    """
    own, words = split(argv)
    environment = accelerate_environment(module, parser, words, own.num_workers)
    settings = {**vars(parser.parse_known_args([])[0]), **parser.given_values(words)}
    on_cpu = str(settings["use_cpu"]).lower() == "true" or environment.get("ACCELERATE_USE_CPU") == "true"
    script = without(words, parser.unknown_arguments(words))
    _connect(own)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = _resources(own.resources_per_worker, on_cpu)
    if not own.autoscaling:
        _check_resources(resources, own.num_workers, ray.cluster_resources())
    folder = Path(settings["output_dir"] or "trainer_output")
    state = own.storage_path  # a URL such as s3://... stays as it is
    state = str(Path(state).absolute()) if state and "://" not in state else state
    places = {"folder": os.getcwd(), "output_dir": str(folder), "checkpoints": _checkpoints(folder)}
    trainer = TorchTrainer(
        _work,
        train_loop_config={"module": module, "argv": script, "environment": environment, **places},
        scaling_config=ScalingConfig(
            num_workers=own.num_workers,
            use_gpu="GPU" in resources,
            resources_per_worker=resources,
            placement_strategy="PACK",  # neighbouring ranks share a machine, for sequence parallelism and vLLM groups
        ),
        torch_config=TorchConfig(
            backend=settings["ddp_backend"] or ("gloo" if on_cpu else "nccl"),
            timeout_s=int(settings["ddp_timeout"]),
        ),
        run_config=RunConfig(storage_path=state, failure_config=FailureConfig(max_failures=own.max_failures)),
    )
    return trainer.fit()


def split(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Divide a command line into Ray's options and the arguments of the script and `accelerate launch`.

    Raises:
        SupportError: Ray is not installed.
        ConfigError: A value is invalid, or an argument sets something that Ray decides.
    """
    if find_spec("ray") is None:
        raise SupportError("--launcher ray needs Ray, which is not installed: pip install 'trl_ext[ray]'.")
    own, words = ray_parser().parse_known_args(list(argv))
    if own.num_workers < 1:
        raise ConfigError(f"--num_workers is {own.num_workers}, fewer than one process. Start at least one.")
    if own.max_failures < 0:
        raise ConfigError(f"--max_failures is {own.max_failures}. Give how often a failed run is started again.")
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in _ACCELERATES:
            raise ConfigError(f"--{name} is accelerate's, and Ray places the workers. Give only --num_workers.")
        if word.partition("=")[0] == FLAG:
            raise ConfigError(
                f"{FLAG} starts servers on the GPUs of one machine, and --launcher ray is given. Start `trl "
                "vllm-serve` on each machine that is to generate, and give their addresses: --vllm_server_base_url."
            )
    return own, words


def accelerate_environment(
    module: str, parser: StrictParser, words: Sequence[str], num_workers: int
) -> Mapping[str, str]:
    """Return the variables that `accelerate launch` would set: mixed precision, ZeRO stage, offload and so on.

    Args:
        module: The script's module, such as trl_ext.scripts.grpo.
        parser: The script's parser.
        words: The command line of the script, with flags of `accelerate launch` in it.
        num_workers: Workers of Ray, one process each.

    Raises:
        ConfigError: The launch file is for several machines, or for another launcher.
    """
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    arguments = launch_arguments(module, parser, words, on_ray=True)
    file = arguments.config_file
    content = content_of(file)
    if (machines := content.get("num_machines") or 1) != 1:
        raise ConfigError(
            f"{file} is for {machines} machines, and Ray places the workers itself. Set num_machines to 1 there, and "
            "give --num_workers."
        )
    arguments.num_processes = num_workers
    with refusals("accelerate cannot launch this"):
        checked, _, _ = _validate_launch_command(arguments)
        checked.num_machines, checked.machine_rank = 1, 0
        if checked.use_deepspeed:
            checked.deepspeed_fields_from_accelerate_config = ",".join(content.get("deepspeed_config") or ())
            made = prepare_deepspeed_cmd_env(checked)[1]
        elif checked.multi_gpu or checked.use_fsdp:
            made = prepare_multi_gpu_env(checked)
        else:
            made = prepare_simple_launcher_cmd_env(checked)[1]
    return {key: value for key, value in made.items() if key not in _RAYS and os.environ.get(key) != value}


def _resources(text: str | None, on_cpu: bool) -> dict[str, float]:
    """Parse `--resources_per_worker`; the default is one CPU, which is also the number of threads, and one GPU."""
    asked = {} if text is None else yaml.safe_load(text)
    if not isinstance(asked, dict) or not all(
        isinstance(key, str) and isinstance(value, int | float) and value >= 0 for key, value in asked.items()
    ):
        raise ConfigError(f"--resources_per_worker is {text}. Give names and numbers, such as '{{GPU: 1, CPU: 8}}'.")
    return {"CPU": 1.0, **({} if on_cpu else {"GPU": 1.0}), **asked}


def _check_resources(wanted: Mapping[str, float], num_workers: int, there: Mapping[str, float]) -> None:
    """Raise ConfigError if the cluster has too few resources, for which Ray would wait without end."""
    for name, number in wanted.items():
        has = there.get(name, 0)
        if number * num_workers > has:
            raise ConfigError(
                f"{num_workers} workers with {number:g} {name} each are to start, and the cluster has {has:g} {name}. "
                "Give fewer --num_workers, other --resources_per_worker, or --autoscaling if the cluster starts "
                "machines on demand."
            )


def _connect(own: Namespace) -> None:
    """Connect to the cluster, or start one on this machine; does nothing the second time."""
    import ray

    if ray.is_initialized():
        return
    address = own.address or os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"include_dashboard": False}
    try:
        if address and ":" in address and "://" not in address:  # else Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # else each line of a worker is printed twice
        hook = {"worker_process_setup_hook": f"{__name__}.prepare_process"}
        ray.init(address=address, logging_level=logging.WARNING, runtime_env=hook, **local)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"There is no Ray cluster at {address or 'this machine'}: {reason}. Start one by `ray start --head`, or "
            "leave --address out to start a cluster on this machine."
        ) from error


# In a worker -------------------------------------------------------------------------------------------------------


def prepare_process() -> None:
    """Set up a process of Ray before it joins a process group; Ray calls it in each of them."""
    import ray

    if "GLOO_SOCKET_IFNAME" not in os.environ and not has_address_of_its_own():
        if interface := interface_of(ray.util.get_node_ip_address()):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    # Silences a line for each report, and another for requests to a missing dashboard.
    cleaner = "ray.train.v2._internal.execution.controller.placement_group_cleaner"
    context = find_spec("ray.train.v2._internal.execution.context")
    for name in (cleaner, str(context and context.origin)):  # the second logger is named after its file
        logging.getLogger(name).addFilter(lambda line: line.levelno >= logging.ERROR)


def _work(config: dict[str, Any]) -> int:
    """Run the script in this worker, and return its exit code if another attempt would not help.

    Raises:
        Exception: The script failed: Ray restarts all workers.
    """
    if Path(config["folder"]).is_dir():
        os.chdir(config["folder"])  # paths of a recipe are relative to the user's working folder
    os.environ.update(config["environment"])
    import ray.train

    argv = list(config["argv"])
    # New checkpoints mean that Ray has restarted this run.
    new = set(_checkpoints(Path(config["output_dir"]))) - set(config["checkpoints"])  # `overwrite` removes some
    if ray.train.get_checkpoint() is not None or new:
        argv += ["--resume_from_checkpoint", "true"]
    main: Callable[[Sequence[str], Sequence[Any]], None] = import_module(config["module"]).main
    try:
        main(argv, [_report_callback()])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else _ATTEMPT_FAILED
        if code not in _FINAL:
            raise RuntimeError(f"the script ended with exit code {code}; its own output has the reason") from ended
        return code
    return 0


def _checkpoints(folder: Path) -> list[str]:
    return sorted(f"{path.name} of {path.stat().st_mtime_ns}" for path in folder.glob(f"{CHECKPOINT}-*"))


def _report_callback() -> Any:
    """Make the callback that reports the metrics of every log and the path of each checkpoint to Ray."""
    import ray.train
    from transformers import TrainerCallback

    class ReportToRay(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Overrides transformers.TrainerCallback.on_log: send the log's numbers and the step to Ray."""
            numbers = {key: float(value) for key, value in (logs or {}).items() if isinstance(value, Real)}
            ray.train.report({**numbers, "step": state.global_step})

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir).absolute() / f"{CHECKPOINT}-{state.global_step}"
            # Stores the path and no copy: all workers can read the folder.
            with TemporaryDirectory() as pointer:
                (Path(pointer) / "checkpoint.json").write_text(json.dumps({"path": str(folder)}))
                checkpoint = ray.train.Checkpoint.from_directory(pointer) if state.is_world_process_zero else None
                ray.train.report({"step": state.global_step}, checkpoint=checkpoint)

    return ReportToRay()
