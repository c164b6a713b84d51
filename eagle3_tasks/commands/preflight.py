"""``eagle3 preflight``: everything that can be known to be wrong before the first GPU hour.

All checks run, whatever the ones before found; all problems are reported together, each as
the fact and what to do.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from eagle3_tasks.contracts.digests import release_digest
from eagle3_tasks.contracts.errors import (
    DiskProblem,
    GpuProblem,
    InvalidInput,
    InvalidSettings,
    MissingSoftware,
    PipelineError,
    UserProblem,
)
from eagle3_tasks.host.disk import GB, judge_disk, read_disk
from eagle3_tasks.host.files import make_private_folder, write_json
from eagle3_tasks.host.gpus import judge_gpus, read_gpus
from eagle3_tasks.host.launch import package_folder
from eagle3_tasks.host.machine import host_name
from eagle3_tasks.host.mounts import mount_of
from eagle3_tasks.host.root_folder import prepare_root
from eagle3_tasks.host.stage_context import StageContext

logger = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
REQUIRED_PACKAGES: Mapping[str, tuple[int, ...]] = {
    "torch": (2, 13),
    "transformers": (5, 19),
    "safetensors": (0, 6),
    "numpy": (2,),
    "psutil": (7,),
    "jinja2": (3, 1),
    "matplotlib": (3, 10),
}
CUDA_PACKAGES: Mapping[str, tuple[int, ...]] = {"nvidia-ml-py": (13,), "accelerate": (1, 15)}
SETUP_REMEDY = (
    "Run the DAG eagle3_setup_host, or `eagle3 setup-host --spec FILE` on the host, which makes ROOT/env"
)

Outcome = Literal["pass", "warn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table. ``error`` is there where the outcome is ``fail``."""

    name: str
    outcome: Literal["pass", "warn", "fail"]
    line: str
    error: PipelineError | None = None


def run_preflight(context: StageContext) -> dict[str, Any]:
    """Check host, settings and inputs of a run, and pin its settings in the run's folder.

    Raises:
        UserProblem: something only a person can mend; the message lists everything found,
            one problem a line.
        NodeProblem: nothing but problems that may pass by themselves.
    """
    report = _check(context, tuple(CHECKS))
    write_json(
        make_private_folder(context.layout.run(context.spec.run_key)) / SETTINGS_FILE, context.settings
    )
    return report


def run_check_host(context: StageContext) -> dict[str, Any]:
    """Check the host alone, before any run: what needs no conversations and no target.

    Raises:
        UserProblem: as :func:`run_preflight`.
        NodeProblem: as :func:`run_preflight`.
    """
    return _check(context, HOST_CHECKS)


def _check(context: StageContext, names: Sequence[str]) -> dict[str, Any]:
    checks = [_run(name, CHECKS[name], context) for name in names]
    for check in checks:
        level = {"pass": logging.INFO, "warn": logging.WARNING, "fail": logging.ERROR}[check.outcome]
        logger.log(level, "preflight check=%s result=%s %s", check.name, check.outcome, check.line)
    problems = [check.error for check in checks if check.error is not None]
    if problems:
        leading = next((problem for problem in problems if isinstance(problem, UserProblem)), problems[0])
        raise type(leading)("\n".join(str(problem) for problem in problems))
    return {
        "host": host_name(),
        "python": platform.python_version(),
        "release": release_digest(package_folder()),
        "checks": [{"name": check.name, "result": check.outcome, "line": check.line} for check in checks],
    }


def check_packages(context: StageContext) -> tuple[Outcome, str]:
    """Compare installed packages with what the stages need."""
    is_cuda = context.settings.host.device == "cuda"
    wanted = {**REQUIRED_PACKAGES, **(CUDA_PACKAGES if is_cuda else {})}
    installed = {name: _installed_version(name) for name in wanted}
    problems = [
        f"{name} is {'absent' if found is None else found}, {'.'.join(map(str, least))} or later is needed"
        for name, least in wanted.items()
        if (found := installed[name]) is None or _numbers(found) < least
    ]
    torch = installed["torch"]
    if is_cuda and torch is not None and torch.endswith("+cpu"):
        problems.append(f"torch is {torch}, built without CUDA, but device is 'cuda'")
    if problems:
        raise MissingSoftware(f"{host_name()}: {'; '.join(problems)}. {SETUP_REMEDY}.")
    return "pass", " ".join(f"{name}={version}" for name, version in installed.items())


def check_root(context: StageContext) -> tuple[Outcome, str]:
    """Make sure that jobs can live under ROOT."""
    root = prepare_root(Path(context.settings.host.root), make_root=True)
    mount = mount_of(root)
    return "pass", f"root={root} file_system={mount.file_system if mount else 'unknown'}"


def check_disk(context: StageContext) -> tuple[Outcome, str]:
    """Try a write, and see that the reserve is free. What a run needs is known after plan."""
    host = context.settings.host
    report = read_disk(Path(host.root))
    verdict = judge_disk(report, 0, round(host.disk_reserve_gb * GB))
    if verdict.is_ready:
        return "pass", verdict.line
    may_pass = report.is_stalled or report.is_read_only or report.write_error is not None
    raise (DiskProblem if may_pass else InvalidSettings)(f"{host_name()}: {verdict.line}")


def check_gpus(context: StageContext) -> tuple[Outcome, str]:
    """See that the cards exist. Whether they are free is the sensors' question."""
    host = context.settings.host
    if host.device == "cpu":
        return "pass", "no GPU is needed: the run chose the CPU."
    needed = max(host.extraction_gpus, host.training_processes)
    report = read_gpus()
    verdict = judge_gpus(report, needed, host.device, ())
    if not report.cards:
        line = f"{host_name()}: device is 'cuda', but {verdict.line}"
        raise (
            InvalidSettings(f"{line} Choose device 'cpu', or another host.")
            if report.is_broken
            else GpuProblem(line)
        )
    if len(report.cards) < needed:
        raise InvalidSettings(f"{host_name()}: {verdict.line}")
    return ("pass" if verdict.is_ready else "warn"), verdict.line


def check_conversations(context: StageContext) -> tuple[Outcome, str]:
    """See that the conversations can be read and hold an assistant's turn."""
    return "pass", _look_at_conversations(Path(context.settings.data.conversations_path))


def check_evaluation_sets(context: StageContext) -> tuple[Outcome, str]:
    """See the same of each held-out set."""
    problems: list[str] = []
    lines: list[str] = []
    for one in context.settings.evaluation.evaluation_sets:
        try:
            lines.append(_look_at_conversations(Path(one.path)))
        except InvalidInput as error:
            problems.append(f"evaluation set {one.name!r}: {error}")
    if problems:
        raise InvalidInput("\n".join(problems))
    return "pass", " ".join(lines) or "there is no held-out set."


def check_target(context: StageContext) -> tuple[Outcome, str]:
    """See that the target model is whole, and that the draft's settings fit it."""
    from eagle3_tasks.engines.target_folder import check_target_folder, read_target_description

    settings = context.settings
    check_target_folder(settings)
    target = read_target_description(settings)
    problems: list[str] = []
    if settings.draft.draft_vocab_size > target.vocab_size:
        problems.append(
            f"draft_vocab_size is {settings.draft.draft_vocab_size}, but the target's vocabulary has only "
            f"{target.vocab_size} ids. Set draft_vocab_size to at most {target.vocab_size}."
        )
    layers = settings.target.aux_layer_ids
    if layers is not None and max(layers) >= target.num_layers:
        problems.append(
            f"aux_layer_ids is {list(layers)}, but the target has {target.num_layers} layers, "
            f"0 to {target.num_layers - 1}. Name three of those, or leave the field empty."
        )
    if problems:
        raise InvalidSettings("\n".join(problems))
    return "pass", (
        f"architecture={target.architecture} layers={target.num_layers} hidden_size={target.hidden_size} "
        f"vocab_size={target.vocab_size}"
    )


def check_target_tokenizer(context: StageContext) -> tuple[Outcome, str]:
    """See that the package is there which the target's kind of tokenizer needs."""
    folder = Path(context.settings.target.target_model)
    if not folder.is_absolute() or (folder / "tokenizer.json").exists():
        return "pass", "the tokenizer needs no further package."
    for file, package in (("tiktoken.model", "tiktoken"), ("tokenizer.model", "sentencepiece")):
        if (folder / file).exists() and _installed_version(package) is None:
            raise MissingSoftware(
                f"{host_name()}: {folder / file} needs the Python package {package}, which is absent. "
                f"Install it: `ROOT/env/bin/pip install {package}`."
            )
    return "pass", "the tokenizer's package is installed."


CHECKS: Mapping[str, Callable[[StageContext], tuple[Outcome, str]]] = {
    "packages": check_packages,
    "root": check_root,
    "disk": check_disk,
    "gpus": check_gpus,
    "conversations": check_conversations,
    "evaluation_sets": check_evaluation_sets,
    "target": check_target,
    "target_tokenizer": check_target_tokenizer,
}
HOST_CHECKS = ("packages", "root", "disk", "gpus")


def _run(name: str, look: Callable[[StageContext], tuple[Outcome, str]], context: StageContext) -> Check:
    try:
        outcome, line = look(context)
    except PipelineError as error:
        return Check(name=name, outcome="fail", line=str(error), error=error)
    except ImportError as error:
        # The check of packages names what is missing; without it this one can't be made.
        return Check(name=name, outcome="warn", line=f"not checked: {error}.")
    return Check(name=name, outcome=outcome, line=line)


def _look_at_conversations(path: Path) -> str:
    from eagle3_tasks.data.conversations import Conversation, ConversationReader

    reader = ConversationReader(path)
    for row in reader:
        if isinstance(row, Conversation):
            return f"path={path} first_conversation={row.id}"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in reader.reasons.most_common(4))
    raise InvalidInput(
        f"{path}: none of its {reader.counts['lines']} lines is a conversation with an assistant's turn"
        f"{f' ({reasons})' if reasons else ''}. Give one conversation a line, with ShareGPT `conversations` "
        "or OpenAI `messages`."
    )


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))
