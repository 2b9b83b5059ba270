"""Runs of several processes (the fixture `processes`), forked by warm.py.

What each of them returned, or the error that it ended with, comes as [[rank's answer], ...].
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from finetune_runs import InterruptAt, small
from step_gradients import one_step
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from twellctl.cli import main as command_line
from twellctl.dry_run import dry_run
from twellctl.errors import TwellError
from twellctl.finetune import finetune
from twellctl.here.processes import check_same, from_all
from twellctl.models import shard_writer
from twellctl.models.checkpoint import open_checkpoint
from twellctl.models.loading import load_model
from twellctl.training import build, optimizer, replicas, sharded_weights, teacher, trainer
from twellctl.training.optimizer import make_optimizer
from twellctl.training.progress import Progress
from twellctl.training.sharded_checkpoints import CheckpointWriter
from twellctl.training.sharded_trainer import ShardedTrainer

ARGUMENTS = SimpleNamespace(
    learning_rate=0.01, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0
)
SHAPES = [(7, 5), (7, 5), (7, 5), (7, 5), (3, 8), (2, 9), (16, 4), (1, 6)]


def muon(at_once: int) -> float:
    """How far the sharded optimizer is from the whole one after three steps."""
    dist.init_process_group("gloo")
    optimizer.AT_ONCE = at_once
    whole, cut = _matrices(), _matrices()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(cut, mesh=mesh)
    makers = [make_optimizer(model, (), ARGUMENTS) for model in (whole, cut)]
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for p, part in zip(whole.parameters(), cut.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=draw)
            part.grad = distribute_tensor(p.grad, mesh, part.placements)
        for made in makers:
            made.step()
    pairs = zip(whole.parameters(), cut.parameters(), strict=True)
    return max((p - part.full_tensor()).abs().max().item() for p, part in pairs)


def _matrices() -> nn.Module:
    """A model whose matrices are those of layers; some have fewer rows than there are processes."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(n, m) for m, n in SHAPES))
    return nn.Sequential(OrderedDict(model=nn.Sequential(OrderedDict(layers=layers))))


def run(model: str, out: str, changes: dict, how: dict) -> list[float]:
    """(coefficient, density) that `finetune` ends with in this process.

    `how`: `file_bytes` of what is written; below how many elements a gradient is `small`; the steps
    at which the first process is interrupted (`interrupt_at`), and the others are killed
    (`kill_at`) or can write no more (`full_at`); after how many checkpoints the first can write no
    more (`first_full_after`); whether they are killed at the first save (`kill_in_save`), whether
    to `resume`; which processes record the parts of their steps, for the others cannot
    (`recorded_by`).
    """
    teacher.prompts_in = lambda *given: []  # which would take as long as the steps
    shard_writer.SHARD_BYTES = how.get("file_bytes", shard_writer.SHARD_BYTES)
    replicas.SMALL = how.get("small", replicas.SMALL)
    if "recorded_by" in how:
        build._captures = lambda recipe: True
        able = int(os.environ["RANK"]) in how["recorded_by"]
        trainer.CapturedPart = PlayedPart if able else _out_of_memory
    recipe = small(**{"batch_size": 6, "micro_batch_size": 1, "shard": "always"} | changes)
    done = finetune(model, out, recipe, resume=how.get("resume", False), progress=_progress(how))
    return [done.l1, done.density]


class PlayedPart:
    """In the place of a recorded part: the same, run anew."""

    def __init__(self, run, ids, num_parts, parameters):
        self.run, self.shape, self.num_parts = run, ids.shape, num_parts

    def takes(self, ids, num_parts):
        return ids.shape == self.shape and num_parts == self.num_parts

    def __call__(self, ids):
        return self.run(ids)


def _out_of_memory(*given):
    raise RuntimeError("out of memory")


def means() -> float:
    """How far averaged gradients are from the means, of products that each process orders anew.

    Of some matrices only one process gets the mean.
    """
    dist.init_process_group("gloo")
    rank, world, replicas.SMALL = dist.get_rank(), dist.get_world_size(), 9
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(*shape) for shape in [(3, 3)] * 4 + [(3,)])
    *factors, unused, small_one = model
    by_order = factors[rank:] + factors[:rank]
    product = torch.ones(3, 3) * (rank + 1)
    for factor in by_order:
        product = factor @ product
    loss = (product @ small_one).sum()
    mine = torch.autograd.grad(loss, [*by_order, small_one], retain_graph=True)
    wanted = dict(zip([*by_order, small_one], mine, strict=True))
    wanted = {p: sum(from_all(wanted[p])) / world for p in [*factors, small_one]}
    held = replicas.Replicas(model, {factors[0]: 0, factors[1]: 1})
    assert [held.has_mean(p) for p in factors[:2]] == [rank == 0, rank == 1]
    with held.sending(True):
        loss.backward()
    held.average_rest(large_sent=True)
    assert unused.grad is None
    counted = from_all({i for i, p in enumerate([*factors, small_one]) if held.counts(p)})
    assert sum(map(len, counted)) == len(set().union(*counted)) == 4  # each by one of them
    own = {p: mean for p, mean in wanted.items() if held.has_mean(p)}
    return max((p.grad - mean).abs().max().item() for p, mean in own.items())


def _progress(how: dict) -> Progress:
    if os.environ.get("RANK", "0") == "0":
        if "first_full_after" in how:
            _fill_after(how["first_full_after"])
        at = how.get("interrupt_at")
        return InterruptAt(at) if at else Progress()
    if how.get("kill_in_save"):
        CheckpointWriter.begin = _kill
    if "kill_at" in how:
        _act_at(how["kill_at"], _kill)
    if "full_at" in how:
        _act_at(how["full_at"], _fill_behind_what_is_written)
    return Progress()


def _kill(*given) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fill() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (999, -1))


def _fill_behind_what_is_written(trainer) -> None:
    if trainer._writer._writing:
        wait([trainer._writer._writing])
    _fill()


def _fill_after(count: int) -> None:
    write, begun = ShardedTrainer._write_small_state, []

    def writing(trainer, folder):
        begun.append(folder)
        if len(begun) > count:
            _fill()
        write(trainer, folder)

    ShardedTrainer._write_small_state = writing


def _act_at(step: int, act) -> None:
    """Let a trainer `act` as it begins to end a step."""
    finish = ShardedTrainer.finish_step

    def acting(trainer, interrupted):
        if trainer.state.global_step == step:
            act(trainer)
        return finish(trainer, interrupted)

    ShardedTrainer.finish_step = acting


def load(model: str) -> list[str]:
    """The weights and buffers that are not what one process loads."""
    dist.init_process_group("gloo")
    checkpoint, cpu = open_checkpoint(model), torch.device("cpu")
    cut = sharded_weights.load_sharded(checkpoint, cpu, torch.float32)
    whole = load_model(checkpoint, dtype=torch.float32, device=cpu)
    pairs = zip(whole.named_parameters(), cut.parameters(), strict=True)
    wrong = [name for (name, p), part in pairs if not torch.equal(p, part.full_tensor())]
    pairs = zip(whole.named_buffers(), cut.buffers(), strict=True)
    return wrong + [name for (name, one), other in pairs if not torch.equal(one, other)]


def dry(model: str, changes: dict, other: dict) -> list:
    """What a dry run tells this process; the last one is started with `other` settings, too."""
    given = {"batch_size": 4, "micro_batch_size": 1} | changes
    if os.environ["RANK"] != "0":
        given |= other
    found = dry_run(model, small(**given))
    return [found.num_processes, found.is_sharded, found.num_trained, found.tokens_per_second > 0]


def slow_disk(folder: str) -> int:
    """At which step a checkpoint has ended, that the last process writes for some steps longer."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = _matrices()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    made = make_optimizer(model, (), ARGUMENTS)
    made.allocate()
    if dist.get_rank() == dist.get_world_size() - 1:
        write = FileSystemWriter.write_data
        FileSystemWriter.write_data = lambda *given: time.sleep(0.5) or write(*given)
    writer, step = CheckpointWriter(), 0
    writer.begin(Path(folder), model, made)
    while not writer.ended(wait=False):
        time.sleep(0.1)
        dist.barrier()
        step += 1
    return step


def same(what: dict) -> None:
    """Whether all processes have what the first has; the last has something else."""
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    check_same({"text": 1, "recipe": 2} | (what if last else {}), "give all the same")


def gradients(model: str, text: str, out: str, file: str) -> None:
    """The first process saves the gradients of a step of all."""
    one_step(model, text, out, micro_batch=2, checkpointing=True, gradients=file)


def command(*words: str) -> list:
    """How `twellctl` ends in this process: [exit code, stdout, stderr]."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        sys.argv, code = ["twellctl", *words], None
        command_line.SECONDS_TO_SPEAK = 0  # one cause of all is printed by the first alone
        try:
            command_line.main()
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
        return [code, *(file.seek(0) or file.read() for file in (stdout, stderr))]


JOBS = (muon, run, means, load, dry, slow_disk, same, gradients, command)
JOBS = {job.__name__: job for job in JOBS}


def fork(job: str, count: int, words: list) -> list:
    """What each process has answered; None of one that was killed."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        answers = [Path(folder) / str(rank) for rank in range(count)]
        children = [_child(job, rank, port, answers, words) for rank in range(count)]
        for child in children:
            os.waitpid(child, 0)
        return [json.loads(a.read_text()) if a.exists() else None for a in answers]


def _child(job: str, rank: int, port: int, answers: list[Path], words: list) -> int:
    if child := os.fork():
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if len(answers) > 1:
            launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(answers)}
            launched |= {"LOCAL_WORLD_SIZE": len(answers), "MASTER_PORT": port}
            os.environ.update({k: str(v) for k, v in launched.items()}, MASTER_ADDR="localhost")
        try:
            answer = JOBS[job](*words)
        except TwellError as error:
            answer = str(error)
        except Exception:
            answer = traceback.format_exc()
        answers[rank].write_text(json.dumps(answer))
        with contextlib.suppress(Exception):  # the first process keeps the store of all
            dist.barrier()
    finally:
        os._exit(0)
