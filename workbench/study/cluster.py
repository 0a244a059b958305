"""Runs of a study as jobs of Slurm, by submitit; its local executor runs the same code here.

Runs that begin together are one array job. A job outlives the `wb study run` that submitted it: the
ledger names it, and whoever runs the study next follows it rather than training the run again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from workbench.errors import UserError, did_you_mean, storing
from workbench.spec.run import RunSpec
from workbench.study import processes
from workbench.study.cluster_job import RunJob
from workbench.study.launchers import Handle, Order
from workbench.study.machine import Share, share_machine, threads_of_environment
from workbench.track.provenance import PACKAGE, redact
from workbench.track.store import Store, is_locked

Executor = Literal["slurm", "local"]
LAUNCHERS: dict[str, Executor] = {"slurm": "slurm", "submitit-local": "local"}

JOBS = "jobs"
_CRASHED = 70
_ASK_SECONDS = 5.0
_LISTS = ("setup", "teardown", "srun_args")
_DEFAULTS: dict[Executor, dict[str, Any]] = {
    # A job whose time is up is queued again, so that this is no limit of a run.
    "slurm": {"timeout_min": 240, "slurm_signal_delay_s": 120},
    "local": {"timeout_min": 60 * 24 * 30},
}
_TIMEOUTS = 100  # after which submitit gives a job up


class JobLauncher:
    """Submits runs by submitit."""

    def __init__(self, executor: Executor, options: Mapping[str, Any], folder: Path) -> None:
        """`folder` is the study's. Nothing is written.

        Raises:
            UserError: submitit or Slurm is missing, or an option is not one of its.
        """
        require_submitit(executor)
        self._executor, self._options, self._folder = executor, dict(options), folder
        _require_known(executor, self._options)

    def share(
        self, specs: Sequence[RunSpec], store: Store, threads: int | None, most: int | None
    ) -> Share:
        """On this machine as processes share it; in a queue all at once, unless told otherwise."""
        if self._executor == "local":
            return share_machine(specs, store, threads, most)
        each = threads or threads_of_environment() or self._options.get("cpus_per_task") or 1
        return Share(len(specs) or 1, int(each), "one array job")

    def start(self, orders: Sequence[Order], store: Store, lock: int) -> Iterator[Handle]:
        """Submits them, as one array where there are several.

        Raises:
            UserError: the queue refuses them.
            StoreError: the store cannot be written.
        """
        jobs = [_job_of(one, store) for one in orders]
        parameters = _DEFAULTS[self._executor] | {
            "name": self._folder.name,
            "cpus_per_task": orders[0].threads,
            **_prefixed(self._executor, self._options),
        }
        with _environment([one.spec for one in orders]), storing(self._folder):
            submitted = _submit(self._executor, self._folder, parameters, jobs)
        for order, job in zip(orders, submitted, strict=True):
            name = f"{self._executor}:{job.job_id}"
            folder = store.runs / (order.go_on or order.spec.name)
            yield JobHandle(order.spec.name, order.log, name, job, folder)

    def hear(self, running: Sequence[Handle], number: int) -> bool:
        """Jobs of this machine save and end; those of a queue go on."""
        if self._executor != "local":
            return False
        for one in running:
            if isinstance(one, JobHandle):
                one.end()
        return True

    def stop_all(self, running: Sequence[Handle], number: int) -> None:
        """As `hear`."""
        self.hear(running, number)


@dataclass
class JobHandle:
    """A job that has a run in hand. `source` is submitit's; `folder` the run's."""

    run: str
    log: Path
    job: str
    source: Any
    folder: Path
    _asked: float = field(default=0.0, repr=False)
    _said: str = field(default="", repr=False)

    def ended(self) -> int | None:
        """The exit code of its run, or None while it goes on, waits, or is queued again."""
        executor, _, number = self.job.partition(":")
        if executor == "slurm" and time.monotonic() - self._asked < _ASK_SECONDS:
            return None
        self._asked = time.monotonic()
        result = Path(self.source.paths.result_pickle)
        if not result.exists():
            if executor == "local":
                self.source.done()  # takes note of a child that has ended
                # What it trains may still be saving when its controller is gone.
                gone = not _is_controller(_process_of(self.job)) and not is_locked(self.folder)
            else:
                gone = _left_the_queue(self.source, number)
            if not gone or result.exists():
                return None
            self._said = "its job ended without a result (cancelled, or its machine failed)"
            return _CRASHED
        outcome, value = self.source._get_outcome_and_result()
        if outcome == "success":
            return int(value)
        self._said = str(value).strip().rpartition("\n")[2]
        return _CRASHED

    def end(self) -> None:
        """Lets the run of a job on this machine save and end."""
        process = _process_of(self.job)
        if process is not None and _is_controller(process):
            with contextlib.suppress(psutil.Error):
                process.terminate()

    def last_words(self, code: int) -> str:
        """Why it ended."""
        return self._said or processes.last_words(self.log, code)


def attach(job: str, run: str, log: Path, folder: Path, jobs: Path) -> JobHandle | None:
    """The job that an earlier `wb study run` gave a run to; None: it is over.

    Raises:
        UserError: it cannot be asked from here.
    """
    executor, _, number = job.partition(":")
    paths = list(jobs.glob(f"*/{number}_*_result.pkl"))
    if paths:
        return None
    try:
        require_submitit("slurm" if executor == "slurm" else "local")
    except UserError as error:
        message = f"{job} was given this run, and whether it still has it cannot be asked here"
        allowed = "a machine of that cluster, or --take-over where that job is known to be gone"
        raise UserError.at(run, f"{message}: {error.faults[0].message}", None, allowed) from None
    import submitit

    if executor == "slurm":
        source: Any = submitit.SlurmJob(folder=jobs / "%j", job_id=number)
    else:
        source = submitit.LocalJob(folder=jobs / "%j", job_id=number)
        if not _is_controller(_process_of(job)):
            return None
    found = JobHandle(run, log, job, source, folder)
    return None if found.ended() is not None else found


def options_of(pairs: Sequence[str]) -> dict[str, Any]:
    """The options `--job KEY=VALUE`; a list gains an entry each time.

    Raises:
        UserError: one is not of that form, or stands twice.
    """
    found: dict[str, Any] = {}
    for text in pairs:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UserError.at("--job", "written KEY=VALUE", text, "partition=gpu")
        if key in _LISTS:
            found.setdefault(key, []).append(value)
        elif key in found:
            raise UserError.at("--job", f"{key} stands twice", text, "each once")
        else:
            found[key] = _value(value)
    return found


def require_submitit(executor: Executor) -> None:
    """Does nothing where jobs can be submitted.

    Raises:
        UserError: submitit is not installed, or this is no machine that submits to Slurm.
    """
    place = "--launcher"
    name = next(name for name, kind in LAUNCHERS.items() if kind == executor)
    if importlib.util.find_spec("submitit") is None:
        message = "submitit is not installed"
        raise UserError.at(place, message, name, "pip install 'workbench[slurm]'")
    if executor != "slurm":
        return
    missing = [program for program in ("sbatch", "srun", "scontrol") if not shutil.which(program)]
    if missing:
        message = f"there is no {missing[0]} here: this machine does not submit to Slurm"
        raise UserError.at(place, message, name, "a login node of a cluster; or submitit-local")


def _require_known(executor: Executor, options: Mapping[str, Any]) -> None:
    known = _known(executor)
    for key in options:
        if key not in known:
            hint = did_you_mean(key, known)
            message = f"submitit has no such option for {executor}.{hint}".rstrip(".")
            raise UserError.at("--job", message, key, ", ".join(sorted(known)))


def _known(executor: Executor) -> set[str]:
    import submitit

    shared = set(submitit.AutoExecutor._typed_parameters())
    if executor == "local":
        return shared - {"nodes", "tasks_per_node"}
    return (shared | submitit.SlurmExecutor._valid_parameters()) - {"nodes", "tasks_per_node"}


def _prefixed(executor: Executor, options: Mapping[str, Any]) -> dict[str, Any]:
    import submitit

    shared = submitit.AutoExecutor._typed_parameters()
    return {key if key in shared else f"{executor}_{key}": one for key, one in options.items()}


def _submit(
    executor: Executor, folder: Path, parameters: dict[str, Any], jobs: list[RunJob]
) -> list[Any]:
    import logging

    import submitit

    logging.getLogger("submitit").setLevel(logging.ERROR)
    limit = {f"{executor}_max_num_timeout": _TIMEOUTS}
    found = submitit.AutoExecutor(folder=folder / JOBS / "%j", cluster=executor, **limit)
    try:
        found.update_parameters(**parameters)
        return list(found.submit_array(jobs))
    except (AssertionError, ValueError, NameError, TypeError) as error:
        said = str(error).partition("\n")[0]
        raise UserError.at("--job", said) from None
    except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError) as error:
        said = redact(str(error).strip().rpartition("\n")[2])
        raise UserError.at("--launcher", f"the queue takes no job: {said}", executor) from None


def _job_of(order: Order, store: Store) -> RunJob:
    command = [*processes.RUN, str(order.path), "--resume"]
    environment = {"OMP_NUM_THREADS": str(order.threads), "WB_HOME": str(store.home)}
    return RunJob([*command, *filter(None, [order.go_on])], environment, str(order.log))


@contextlib.contextmanager
def _environment(specs: Sequence[RunSpec]) -> Iterator[None]:
    """What jobs get from this process: where the package is, and an address with credentials, which
    no file may hold.

    Raises:
        UserError: the runs have several such addresses.
    """
    uris = {spec.tracking.uri for spec in specs if spec.tracking.uri}
    secret = {uri for uri in uris if redact(uri) != uri}
    if len(secret) > 1:
        message = "jobs that are submitted together can have one address with credentials"
        raise UserError.at("tracking.uri", message, None, "the same for all arms")
    before = dict(os.environ)
    paths = [str(PACKAGE.parent), before.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    for uri in secret:
        os.environ["MLFLOW_TRACKING_URI"] = uri
    try:
        yield
    finally:
        for name in ("PYTHONPATH", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _left_the_queue(source: Any, number: str) -> bool:
    """Whether Slurm has ended a job; where its accounting says nothing, the queue is asked."""
    if source.watcher.is_done(number, mode="standard"):
        return True
    if source.watcher.get_state(number, mode="cache") != "UNKNOWN" or not shutil.which("squeue"):
        return False
    asked = subprocess.run(
        ["squeue", "-h", "-j", number, "-o", "%T"], capture_output=True, text=True, check=False
    )
    invalid = "invalid job id" in asked.stderr.lower()
    return invalid or (asked.returncode == 0 and not asked.stdout.strip())


def _process_of(job: str) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error, ValueError):
        return psutil.Process(int(job.partition(":")[2]))
    return None


def _is_controller(process: psutil.Process | None) -> bool:
    """Whether a process is that of a job of submitit's on this machine: a number may be another
    process's by now."""
    with contextlib.suppress(psutil.Error):
        if process is not None and process.status() != psutil.STATUS_ZOMBIE:
            return "submitit.local._local" in process.cmdline()
    return False


def _value(text: str) -> Any:
    """A number or a truth where it looks like one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
