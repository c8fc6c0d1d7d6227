"""Collectives and wrappers with one process and with two (gloo, CPU)."""

import copy
import socket

import pytest
import torch
from script_runner import run_ranks

from common.processes import Processes, full_weights, load_training_state, no_sync, training_state


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5, bias=False) for _ in range(2)])
        self.out = torch.nn.Linear(5, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)


def steps(net, optimizer, x, count, world=1):
    """Steps on the mean of squares over all rows of all processes; each process holds its part, gradients are averaged."""
    for _ in range(count):
        optimizer.zero_grad(set_to_none=True)
        for i, row in enumerate(x):
            with no_sync(net, i < len(x) - 1):
                ((net(row[None]) ** 2).sum() * world / len(X)).backward()
        optimizer.step()


def plain_run(count):
    net = Net()
    optimizer = adam(net)
    steps(net, optimizer, X, count)
    return net, optimizer


def test_one_process_is_the_identity():
    processes = Processes()
    assert (processes.rank, processes.world, processes.is_main) == (0, 1, True)
    x = torch.tensor([1.5, 2.0], dtype=torch.float64)
    assert processes.all_sum(x) is x
    assert processes.all_max(3.25) == 3.25
    assert processes.union({"b", "a"}) == ["a", "b"]
    assert list(processes.rounds([[1], [2, 3]])) == [[1], [2, 3]]
    assert list(processes.rounds([])) == []
    net = Net()
    assert processes.wrap(net, (), "ddp", False) is net
    with pytest.raises(ValueError, match=r"--parallel fsdp2 needs a launcher, for example: torchrun"):
        processes.wrap(net, net.layers, "fsdp2", False)
    with processes.main_first():
        pass


def test_training_state_round_trip_in_one_process():
    net, optimizer = plain_run(2)
    state = training_state(net, optimizer)
    assert set(state["model"]) == set(net.state_dict()) == set(full_weights(net))
    fresh = Net()
    again = adam(fresh)
    load_training_state(fresh, again, copy.deepcopy(state))  # a checkpoint is a copy too
    steps(net, optimizer, X, 2)
    steps(fresh, again, X, 2)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters()))  # moments and step count came along


def worker(folder):
    """What each of the two processes does; results go to a file for the test to judge."""
    processes = Processes()
    rank, out = processes.rank, {}
    out["identity"] = (rank, processes.world, processes.is_main)
    out["sum"] = processes.all_sum(torch.tensor([0.1 + rank, 2.0**40 + rank], dtype=torch.float64))
    out["max"] = processes.all_max(float(rank))
    out["union"] = processes.union([["b", "c"], ["a", "c"]][rank])
    out["union of nothing"] = processes.union([])
    out["rounds"] = list(processes.rounds([[[1]], [[1], [2], [3]]][rank]))
    mine = X[[0, 2]] if rank == 0 else X[[1, 3, 4, 5]]
    for name in ("ddp", "fsdp2"):
        net = Net()
        wrapped = processes.wrap(net, net.layers if name == "fsdp2" else (), name, False)
        optimizer = adam(wrapped)
        x = [mine[i : i + 1] for i in range(len(mine))]
        x = torch.cat([*x, *[torch.zeros(1, 5)] * (4 - len(x))])  # the same number of passes on both
        weights = torch.tensor([1.0] * len(mine) + [0.0] * (4 - len(mine)))

        def train(wrapped, optimizer, count, x=x, weights=weights):
            for _ in range(count):
                optimizer.zero_grad(set_to_none=True)
                for i in range(4):
                    with no_sync(wrapped, i < 3):
                        ((wrapped(x[i : i + 1]) ** 2).sum() * weights[i] * 2 / len(X)).backward()
                optimizer.step()

        train(wrapped, optimizer, 2)
        out[f"{name} weights"] = copy.deepcopy(full_weights(net))
        state = training_state(net, optimizer)
        fresh = Net()
        again = processes.wrap(fresh, fresh.layers if name == "fsdp2" else (), name, False)
        second = adam(again)
        torch.save(state, f"{folder}/{name}.{rank}.pt")
        torch.distributed.barrier()
        complete = torch.load(f"{folder}/{name}.0.pt", weights_only=True)  # only the main process holds all of it
        load_training_state(fresh, second, complete)
        train(wrapped, optimizer, 2)
        train(again, second, 2)
        out[f"{name} resumed"] = all(torch.equal(a, b) for a, b in zip(full_weights(net).values(), full_weights(fresh).values()))
        out[f"{name} after 4"] = full_weights(net)
    torch.save(out, f"{folder}/out.{rank}.pt")
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    script = folder / "worker.py"
    script.write_text(f"import test_processes\ntest_processes.worker({str(folder)!r})\n")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ended = run_ranks(str(script), [], folder / "log", 2, port)
    assert [e.code for e in ended] == [0, 0], "\n".join(e.output for e in ended)
    return [torch.load(folder / f"out.{rank}.pt", weights_only=True) for rank in range(2)], folder


def test_collectives_over_two_processes(two):
    outs, _ = two
    assert [o["identity"] for o in outs] == [(0, 2, True), (1, 2, False)]
    for o in outs:
        assert o["sum"].tolist() == [0.1 + 1.1, 2.0**41 + 1]  # float64: float32 would lose the 1
        assert o["max"] == 1.0
        assert o["union"] == ["a", "b", "c"]
        assert o["union of nothing"] == []
    assert outs[0]["rounds"] == [[1], [], []]
    assert outs[1]["rounds"] == [[1], [2], [3]]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_train_like_one(two, name):
    outs, _ = two
    for count, key in ((2, f"{name} weights"), (4, f"{name} after 4")):
        want = plain_run(count)[0].state_dict()
        for o in outs:
            assert list(o[key]) == list(want)
            assert all(torch.allclose(o[key][n], want[n], rtol=0, atol=1e-5) for n in want)
    assert [o[f"{name} resumed"] for o in outs] == [True, True]


def test_checkpoints_of_both_kinds_hold_the_same(two):
    _, folder = two
    ddp, fsdp2 = (torch.load(folder / f"{name}.0.pt", weights_only=True) for name in ("ddp", "fsdp2"))
    for part in ("model", "optimizer"):
        assert set(ddp[part]) == set(fsdp2[part])
    for n in ddp["model"]:
        assert torch.allclose(ddp["model"][n], fsdp2["model"][n], rtol=0, atol=1e-5)
    for n, moments in ddp["optimizer"]["state"].items():
        for key, value in moments.items():
            assert torch.allclose(value, fsdp2["optimizer"]["state"][n][key], rtol=1e-4, atol=1e-6)
