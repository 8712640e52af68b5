"""Each law once, behind every door: a cell is a law and a door, and names both when it is red.

doors.py has the doors. What only one of them promises is in the tests of that door.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import doors
import pytest
import torch
import torch.distributed as dist
from doors import DOORS, HALF, STEPS, WHOLE, Net, Seen, Story
from pool import Pool
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import vector_to_parameters

import ringstrategy as ring
import ringstrategy.horovod as hvd
from ringstrategy import AllReduce, BlockInt
from ringstrategy.session import Session

FSDP = ["fsdp", "fsdp_in_group"]
OF_SERVERS = list(doors.OF["served"])  # where servers step
CENTRAL = list(doors.OF["central"])  # where each rank steps a slice
PARTS = ["ddp_hook", "group", *FSDP]  # doors where torch DDP or FSDP2 trains
AGAIN = ["pytorch_lightning", "lightning_fabric"]  # the same source as another door, with other base classes


class Tells:
    """What ranks see; each story is doors.told once, and only if a cell needs it."""

    def __init__(self, ranks: Pool, folder: Path) -> None:
        self.ranks, self._folder = ranks, folder
        self.twin = cache(doors.twin)
        self.on = cache(self._on)

    def _on(self, door: str, story: Story, size: int = 2, *, fails: bool = False) -> list[Seen]:
        seen = self.ranks(size, doors.told, door, story)
        for rank, mine in enumerate(seen if not fails else ()):
            assert not mine.error, f"rank {rank}, {story}:\n{mine.error}"
        return seen

    def saving(self, door: str, algorithm: str) -> Story:
        folder = self._folder / f"{door}-{algorithm}"
        folder.mkdir(exist_ok=True)
        return Story(algorithm, saves=str(folder))


@pytest.fixture(scope="module")
def tells(ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> Tells:
    return Tells(ranks, tmp_path_factory.mktemp("saved"))


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def end_of(seen: list[Seen]) -> Tensor:
    assert len(seen) > 1
    assert all(torch.equal(mine.end, seen[0].end) for mine in seen), "replicas differ"
    return seen[0].end


LAWS: dict[str, Callable[[Tells, str], None]] = {}


def law(check: Callable[[Tells, str], None]) -> Callable[[Tells, str], None]:
    LAWS[check.__name__] = check
    return check


@law
def equal_to_the_mean(tells: Tells, door: str) -> None:
    """Two ranks to the bit, as torch DDP is; three to rounding, and equal among themselves."""
    for mine in tells.on(door, Story()):
        for step, (value, expected) in enumerate(zip(mine.parameters, tells.twin(Story(), 2).parameters, strict=True)):
            assert torch.equal(value, expected), f"after {step} steps"
    three = tells.on(door, Story(), 3)
    assert distance(end_of(three), tells.twin(Story(), 2).parameters[-1]) > 0
    assert distance(end_of(three), tells.twin(Story(), 3).parameters[-1]) < 1e-6


@law
def replicas_are_bit_equal(tells: Tells, door: str) -> None:
    """Through a codec, whose loss shows."""
    for algorithm, size, bound in (("int8", 2, 2e-3), ("int4", 3, 2e-2)):
        seen = tells.on(door, Story(algorithm), size)
        for step in range(1 + STEPS):
            for rank, mine in enumerate(seen):
                same = torch.equal(mine.parameters[step], seen[0].parameters[step])
                assert same, f"{algorithm}: rank {rank} differs after {step} steps"
        exact = tells.twin(Story(), size).parameters[-1]
        assert 1e-6 < distance(end_of(seen), exact) < bound, algorithm


@law
def nothing_is_lost(tells: Tells, door: str) -> None:
    """What the optimizer stepped, and the mean of what is in residuals, are all gradients."""
    for story in (Story("int8"), Story("int8", skips=True)) if door in WHOLE + OF_SERVERS else (Story("int8"),):
        seen, net = tells.on(door, story), Net(0)
        missing, velocity = torch.zeros(()), torch.zeros(len(doors.flat(net)))
        for step, (before, after) in enumerate(pairwise(seen[0].parameters)):
            vector_to_parameters(before.to(doors.DEVICE), net.parameters())
            for rank in range(len(seen)):
                missing = missing + doors.gradients_of(story, net, rank, step) / len(seen)
            moved = torch.full_like(before, True, dtype=torch.bool)
            moved[doors.MORE] = seen[0].moved[step + 1]
            last, velocity = velocity, torch.where(moved, (before - after) / doors.RATE, velocity)
            missing = missing - torch.where(moved, velocity - doors.MOMENTUM * last - doors.DECAY * before, 0)
        held = {name: sum(mine.residuals[STEPS][name] for mine in seen) for name in seen[0].residuals[STEPS]}
        if door == "fsdp":  # by module, in rows of FSDP2's
            vector_to_parameters(missing.to(doors.DEVICE), net.parameters())
            left = [[sum(p.data.sum() for p in getattr(net, name).parameters()), held[name].sum()] for name in held]
            missing, residuals = torch.tensor(left).T
        else:
            residuals = torch.cat([held[name].reshape(-1) for name, _ in net.named_parameters()])
        assert distance(missing, residuals) < 2e-6 < 1e-5 < residuals.abs().max(), story


@law
def fewer_bytes_are_sent(tells: Tells, door: str) -> None:
    """Than without a codec; nobody counts what was not sent."""
    gathers = door == "fsdp_in_group" and doors.DEVICE.type == "cpu"  # parameters, exactly; on GPUs torch does
    low, high = (1.0, 2.0) if gathers else (3.6, 4.0)
    if door in OF_SERVERS:  # of which parameters come exactly
        for encoded, exact in zip(tells.on(door, Story("int8")), tells.on(door, Story()), strict=True):
            assert 1.0 < (exact.sent[-1] - exact.sent[0]) / (encoded.sent[-1] - encoded.sent[0]) <= 2.0
        return
    for encoded, exact in zip(tells.on(door, Story("int8")), tells.on(door, Story()), strict=True):
        for step in range(STEPS):
            of_step = [sent[step + 1] - sent[step] for sent in (exact.sent, encoded.sent)]
            assert low < of_step[0] / of_step[1] <= high, f"step {step}: {of_step}"


@law
def nothing_is_sent_while_accumulating(tells: Tells, door: str) -> None:
    story = Story(passes=2)
    for mine, once in zip(tells.on(door, story), tells.on(door, Story()), strict=True):
        if door != "fsdp_in_group":  # which gathers parameters for each forward
            meets = 2 if door in CENTRAL else 1 if door in OF_SERVERS else 0  # before parameters are shared
            assert mine.accumulated[0] in (0, 32 * meets)
            assert mine.accumulated[1:] == [0] * (STEPS - 1)
            assert mine.sent[-1] - mine.sent[0] == once.sent[-1] - once.sent[0] > 0
        assert torch.equal(mine.end, tells.twin(story, 2).parameters[-1])


@law
def unused_parameters(tells: Tells, door: str) -> None:
    """Used by one rank: the others count zeros. By none: it has no gradient, and does not move."""
    story = Story(skips=True)
    expected = tells.twin(story, 2)
    assert expected.moved == [False, *[True, True, False] * 2]
    for mine in tells.on(door, story):
        assert mine.moved == expected.moved
        assert all(map(torch.equal, mine.parameters, expected.parameters))


@law
def thawed_parameters(tells: Tells, door: str) -> None:
    """They stay as they are while they are frozen, and are averaged from then on."""
    story = Story(thaws=True)
    for mine in tells.on(door, story):
        assert all(map(torch.equal, mine.parameters, tells.twin(story, 2).parameters))


@law
def resumes_bit_for_bit(tells: Tells, door: str) -> None:
    for algorithm in ("int4", "gossip", "local_sgd") if door in WHOLE else ("int4",):
        saving = tells.saving(door, algorithm)
        whole = tells.on(door, saving)
        resumed = tells.on(door, Story(algorithm, resumes=saving.saves))
        for rank, (mine, through) in enumerate(zip(resumed, whole, strict=True)):
            assert torch.equal(mine.end, through.end), f"{algorithm}, rank {rank}"
            for value, expected in zip(mine.parameters, through.parameters[HALF:], strict=True):
                assert torch.equal(value, expected), f"{algorithm}, rank {rank}"


@law
def resumes_at_another_size(tells: Tells, door: str) -> None:
    """Residuals keep their sum; or it is refused with the cure."""
    saving = tells.saving(door, "int4")
    two = tells.on(door, saving)
    three = tells.on(door, Story("int4", resumes=saving.saves), 3, fails=True)
    if door.rpartition("_")[2] not in ("trainer", "fabric"):
        said = "Size mismatch" if door == "fsdp" else "give each rank what it saved itself"
        assert all(said in mine.error for mine in three), three[0].error
        return
    assert [mine.error for mine in three] == [""] * 3
    assert torch.equal(three[0].parameters[0], two[0].parameters[HALF])
    for name in two[0].residuals[HALF]:
        before = sum(mine.residuals[HALF][name].double() for mine in two)
        after = sum(mine.residuals[0][name].double() for mine in three)
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)
    end_of(three)


@law
def a_skipped_step_keeps_residuals(tells: Tells, door: str) -> None:
    """The scaler skips on all ranks, if one has an overflow; residuals are in the unit of unscaled gradients."""
    seen = tells.on(door, Story("int8", scaled=True, spoils=float("inf")))
    end_of(seen)
    for mine, other in zip(seen, tells.on(door, Story("int8")), strict=True):
        moved = [not torch.equal(*pair) for pair in zip(mine.parameters, mine.parameters[1:], strict=False)]
        assert moved == [step != doors.BAD for step in range(STEPS)]
        for name, value in mine.residuals[doors.BAD].items():
            assert torch.equal(value, mine.residuals[doors.BAD + 1][name]), name
            assert 0 < value.abs().max() < 2 * other.residuals[doors.BAD][name].abs().max(), name


@law
def a_gradient_that_is_not_finite_is_so_everywhere(tells: Tells, door: str) -> None:
    for algorithm in ("exact", "int8"):
        for mine in tells.on(door, Story(algorithm, spoils=float("nan"))):
            assert mine.parameters[doors.BAD].isfinite().all()
            assert not mine.parameters[doors.BAD + 1].isfinite().any()


@law
def a_step_that_is_not_finite_can_be_skipped(tells: Tells, door: str) -> None:
    story = Story("skip", spoils=float("nan"))
    for mine in tells.on(door, story):
        assert all(map(torch.equal, mine.parameters, tells.twin(story, 2).parameters))


@law
def ranks_with_parameters_of_their_own_see_one_mean(tells: Tells, door: str) -> None:
    for algorithm in ("gossip", "local_sgd"):
        seen = tells.on(door, Story(algorithm))
        end = end_of(seen)
        assert not torch.equal(seen[0].parameters[1], seen[1].parameters[1])
        if algorithm == "gossip":
            assert distance(end, sum(mine.parameters[-1] for mine in seen) / 2) < 1e-6


@law
def ranks_that_differ_are_told(tells: Tells, door: str) -> None:
    for mine in tells.on(door, Story("differs"), fails=True):
        assert "PlanMismatchError" in mine.error
        assert "BlockInt(" in mine.error
        assert "Identity(" in mine.error


@law
def a_step_within_backward_is_an_error(tells: Tells, door: str) -> None:
    """Of a hook on each parameter: the gradient is this rank's alone there."""
    for mine in tells.on(door, Story(hurries=True), fails=True):
        assert "within backward, where its gradient is this rank's alone" in mine.error
        assert len(mine.parameters) == 1 + doors.BAD


@law
def one_rank_is_plain_training(tells: Tells, door: str) -> None:
    (mine,) = tells.on(door, Story("int8"), 1)
    assert all(map(torch.equal, mine.parameters, tells.twin(Story(), 1).parameters))
    assert mine.sent == [0] * (1 + STEPS)


@law
def closes_clean(tells: Tells, door: str) -> None:
    """No thread, hook or socket is left, and another training goes as well."""
    for (end, *first), (again, *second) in tells.ranks(2, doors.told_again, door):
        assert first[:2] == second[:2] == [[], []]
        assert first[2] >= second[2]
        assert torch.equal(end, again)


A_CODEC = "a codec or a collective goes into it"
WHOSE = "ValueError: this state is of rank"
REFUSED: dict[str, list[tuple[Callable[[], Any], str]]] = {  # what cannot be right, and a part of what is said
    "session": [
        (lambda: Session(Net(0), AllReduce()).load_state_dict({"rank": 1, "world_size": 2}), WHOSE),
    ],
    "trainer": [
        (lambda: ring.RingStrategy(timeout=5), "TypeError: timeout is a datetime.timedelta"),
        (lambda: ring.RingStrategy(timeout=timedelta(0)), "ValueError: timeout must be positive"),
        (lambda: ring.RingStrategy(BlockInt(8)), A_CODEC),
        (lambda: ring.RingStrategy(codec=BlockInt(8)), "RingStrategy(AllReduce(codec=...))"),
        (lambda: ring.RingStrategy(broadcast_buffers=1), "TypeError: broadcast_buffers is True or False"),
        (lambda: ring.RingStrategy(on_peer_loss="stop"), "ValueError: on_peer_loss is 'raise', 'shrink' or 'wait'"),
        (lambda: ring.RingStrategy(on_peer_loss="wait", start_method="fork"), "use start_method='popen'"),
        (lambda: ring.RingStrategy(on_peer_loss="wait", process_group_backend="nccl"), "process_group_backend='gloo'"),
        (lambda: ring.RingStrategy(AllReduce(uneven="join"), on_peer_loss="wait"), "use uneven='error'"),
        (lambda: ring.RingStrategy(ring.LocalSGD(4, within_host=True), on_peer_loss="wait"), "within_host=False"),
        (lambda: ring.RingStrategy(tiemout=timedelta(1)), "did you mean 'timeout'"),
        (lambda: ring.RingStrategy(find_unused_parameters=True), "AllReduce(find_unused_parameters=...))"),
        (lambda: ring.RingStrategy(ddp_comm_hook=print), "here a codec does that"),
        (lambda: ring.RingStrategy(static_graph=True), "'static_graph' is torch DDP's"),
        (lambda: ring.RingStrategy("allreduce"), "ringstrategy.AllReduce()"),
        (lambda: ring.RingStrategy("ring_int5"), "did you mean 'ring_int"),
        (lambda: ring.RingStrategy("ring_int4_fork"), "pass 'ring_int4', and start_method='fork'"),
        (lambda: ring.RingStrategy("central_storage", on_peer_loss="shrink"), "use on_peer_loss='raise'"),
        (lambda: ring.RingStrategy(AllReduce), "ringstrategy.AllReduce()"),
    ],
    "fabric": [
        (lambda: ring.RingFabricStrategy(AllReduce(uneven="join")), "all ranks the same number of batches"),
        (lambda: ring.RingFabricStrategy(ring.Gossip(unit="epoch")), "unit='step'"),
        (lambda: ring.RingFabricStrategy("gosip"), "did you mean 'gossip'?"),
        (lambda: ring.RingFabricStrategy(BlockInt(8)), A_CODEC),
        (lambda: ring.RingFabricStrategy(codec=BlockInt(8)), "RingFabricStrategy(AllReduce(codec=...))"),
        (lambda: ring.RingFabricStrategy(bucket_cap_mb=5), "RingFabricStrategy(AllReduce(bucket_mb=...))"),
        (lambda: ring.RingFabricStrategy(timeout=5), "TypeError: timeout is a datetime.timedelta"),
        (lambda: ring.finish(Net(0)), "TypeError: finish needs the model that fabric.setup returned"),
    ],
    "horovod": [
        (lambda: wrapped(named_parameters=Net(0).parameters()), "not model.parameters()"),
        (lambda: wrapped(named_parameters=[]), "lacks 6 of the optimizer's parameters"),
        (lambda: wrapped(op=hvd.Adasum), "ValueError: Adasum is not there"),
        (lambda: wrapped(op=hvd.Max), "the Average or the Sum"),
        (lambda: wrapped(op=hvd.Sum, gradient_predivide_factor=2.0), "is for op=hvd.Average"),
        (lambda: wrapped(compression=BlockInt(8), algorithm="ring"), "not both"),
        (lambda: wrapped(algorithm="rings"), "did you mean 'ring'?"),
        (lambda: wrapped(algorithm=BlockInt(8)), "TypeError: algorithm is an Algorithm"),
        (lambda: wrapped(algorithm="gossip", op=hvd.Sum), "sums no gradients"),
        (lambda: wrapped(algorithm=ring.LocalSGD(1, unit="epoch")), "count the interval in steps"),
        (lambda: wrapped(algorithm="diloco", scaler=torch.amp.GradScaler("cpu")), "without a scaler"),
        (lambda: wrapped(local=["wait"]), "a list of names of the optimizer's parameters"),
        (lambda: wrapped(sparse=["wait"]), "names ['wait'], which no parameter"),
        (lambda: wrapped(torch.optim.LBFGS), "ValueError: LBFGS"),
        (lambda: hvd_sum(torch.eye(3).to_sparse()), "use hvd.sparse_allreduce_async"),
        (lambda: hvd_sum(torch.ones(3).to(torch.float8_e4m3fn)), "the tensor is of torch.float8_e4m3fn"),
    ],
    "ddp_hook": [
        (lambda: ring.ddp_hook(ring.SmallExact(BlockInt(8))), "pass module=model"),
        (lambda: ring.ddp_hook(BlockInt(8))[0].state_dict(), "pass module=model"),
        (lambda: ring.ddp_hook(BlockInt(8))[0].load_state_dict({}), "pass module=model"),
        (lambda: ring.ddp_hook(ring.TopK(16)), "pass collective=Direct()"),
        (lambda: hook_state(rank=1), WHOSE),
        (lambda: hook_state(world_size=2), WHOSE),
        (lambda: hook_state(residuals={"gone": torch.zeros(1)}), "no place for the residual of gone"),
        (lambda: hook_state(residuals={"last.bias": torch.zeros(1)}), "no place for the residual of last.bias"),
    ],
    "group": [
        (lambda: ring.GroupOptions(AllReduce(BlockInt(8), error_feedback=True)), "has no place here"),
        (lambda: ring.GroupOptions(AllReduce(ring.TopK(), ring.Direct())), "needs to remember the others"),
        (lambda: ring.GroupOptions(AllReduce(ring.SmallExact(BlockInt(8)))), "cannot ask a policy"),
        (lambda: ring.GroupOptions(ring.Choco()), "TypeError: a process group averages by ringstrategy.AllReduce"),
        (lambda: ring.GroupOptions(AllReduce(uneven="join")), "leave local and uneven"),
        (lambda: ring.GroupOptions(AllReduce(on_nonfinite="skip")), "leave on_nonfinite"),
        (lambda: ring.GroupOptions(AllReduce(), exact_below=-1), "exact_below is a number of bytes"),
        (lambda: dist.new_group(backend="ring", pg_options={"bits": 4}), "TypeError: pg_options of backend 'ring' is"),
        (lambda: group_sum(torch.ones(1, 3).expand(2, 3)), "memory of its own with contiguous()"),
        (lambda: group_sum(torch.ones(3).to(torch.float8_e4m3fn)), "collective is of torch.float8_e4m3fn"),
    ],
    "fsdp": [
        (lambda: ring.fsdp(Net(0)), "call torch.distributed.fsdp.fully_shard on it first"),
        (lambda: ring.fsdp(fully_shard(Net(0)), ring.TopK()), "pass collective=Direct()"),
        (lambda: ring.fsdp(fully_shard(Net(0)), collective=ring.Native()), "cannot add what BlockInt"),
        (lambda: ring.fsdp(fully_shard(Net(0)), ring.Identity(), collective=ring.Native()), "has no reduce-scatter"),
        (lambda: ring.fsdp(fully_shard(Net(0)), 8), "TypeError: codec is a ringstrategy codec"),
    ],
}


def hvd_sum(tensor: Tensor) -> None:
    hvd.allreduce(tensor, op=hvd.Sum)


def group_sum(tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=dist.new_group(backend="ring"))


def wrapped(make: Callable[..., Any] = torch.optim.SGD, **arguments: Any) -> None:
    hvd.DistributedOptimizer(make(Net(0).parameters(), 0.1), **arguments)


def hook_state(**changes: Any) -> None:
    net = Net(0)
    state, _ = ring.ddp_hook(BlockInt(8), error_feedback=True, module=net)
    state.load_state_dict({**state.state_dict(), **changes})


def _refusals(door: str) -> list[str]:
    doors.join()
    hvd.init()
    said = []
    for call, _ in REFUSED[door]:
        try:
            call()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    hvd.shutdown()
    return said


@law
def wrong_arguments_are_refused(tells: Tells, door: str) -> None:
    for said, (_, text) in zip(tells.ranks(1, _refusals, door)[0], REFUSED[door], strict=True):
        assert text in said
        assert said.startswith(("ValueError: ", "TypeError: "))


@law
def a_lost_rank_is_named(tells: Tells, door: str) -> None:
    """Last of all, since the processes of the pool are new ones afterwards."""
    outcomes = tells.ranks.outcomes(3, doors.told, door, Story(dies=True))
    assert [error is None for _, error in outcomes] == [True, False, True], "rank 1 was to die"
    for mine, _ in outcomes[::2]:
        assert "PeerLostError: lost rank 1" in mine.error
        assert mine.lost == 1


# The table


NOT_THERE: dict[tuple[str, str], str] = {}


def _not_there(reason: str, laws: list[Callable[..., None]], doors: list[str]) -> None:
    NOT_THERE.update({(each.__name__, door): reason for each in laws for door in doors})


_not_there(
    "torch's own, which shows that the twin is right",
    [LAWS[name] for name in LAWS.keys() - {"equal_to_the_mean", "unused_parameters"}],
    ["ddp"],
)
GROUPS = ["group", "fsdp_in_group"]
_not_there("a process group keeps nothing", [nothing_is_lost, resumes_bit_for_bit, resumes_at_another_size], GROUPS)
_not_there("FSDP2 sums all gradients of a module: test_fsdp.py has the refusal", [unused_parameters], FSDP)
_not_there(
    "torch DDP steps so too, and nobody tells a group; FSDP2 calls the hooks when gradients are averaged",
    [a_step_within_backward_is_an_error],
    ["group", *FSDP],
)
_not_there("torch DDP and FSDP2 watch what trains when they are made", [thawed_parameters], PARTS)
_not_there(
    "neither DDP nor FSDP2 tells of steps and loss scales (docs/integrations.md)",
    [a_skipped_step_keeps_residuals, a_step_that_is_not_finite_can_be_skipped],
    PARTS,
)
_not_there("DDP and FSDP2 average gradients", [ranks_with_parameters_of_their_own_see_one_mean], PARTS)
_not_there("a group's options are those of `group`", [wrong_arguments_are_refused], ["fsdp_in_group"])
_not_there(
    "one source with lightning's, held to the same by the other laws",
    [LAWS[name] for name in LAWS.keys() - {"equal_to_the_mean", "nothing_is_lost", "resumes_bit_for_bit"}],
    AGAIN,
)
_not_there(
    "servers refuse loss scales, and step what is not finite: test_parameter_server.py has what they refuse",
    [a_skipped_step_keeps_residuals, a_step_that_is_not_finite_can_be_skipped, wrong_arguments_are_refused],
    OF_SERVERS,
)
_not_there("in step, replicas are equal", [ranks_with_parameters_of_their_own_see_one_mean], OF_SERVERS + CENTRAL)
_not_there(
    "nothing is encoded, because nothing is sent",
    [replicas_are_bit_equal, nothing_is_lost, fewer_bytes_are_sent, ranks_that_differ_are_told],
    CENTRAL,
)
_not_there(
    "it refuses loss scales, and steps what is not finite: test_central_storage.py has what it refuses",
    [a_skipped_step_keeps_residuals, a_step_that_is_not_finite_can_be_skipped, wrong_arguments_are_refused],
    CENTRAL,
)
if doors.DEVICE.type == "cuda":
    _not_there("it shares the memory of CPUs", list(LAWS.values()), CENTRAL)
if doors.DEVICE.type == "cuda" and doors.BACKEND == "gloo":
    _not_there("torch's gloo gathers no tensors of GPUs, which FSDP2 asks for", list(LAWS.values()), ["fsdp"])
CELLS = [(door, name) for name in LAWS for door in DOORS if (name, door) not in NOT_THERE]


@pytest.mark.parametrize(("door", "name"), CELLS, ids=[f"{door}-{name}" for door, name in CELLS])
def test_law(tells: Tells, door: str, name: str) -> None:
    LAWS[name](tells, door)
