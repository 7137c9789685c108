"""On a torch that was built without torch.distributed, models of one process train as elsewhere."""

from pathlib import Path

from tests.own_process import said

BUILT_WITHOUT = """
import importlib.machinery, sys

PARTS = "_c10d_init _distributed_c10d _rpc_init _dist_autograd_init _faulty_agent_init".split()

class Loader:
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        for name in PARTS:
            vars(module).pop(name, None)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = Loader(spec.loader)
            return spec

sys.meta_path.insert(0, Finder())
"""

TRAINS = """
import torch
from torch import nn
import joma
from joma.optim import GaLoreAdamW
from joma.runs import Run

assert not torch.distributed.is_available()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(32, 16),
    nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 1, enable_nested_tensor=False),
    nn.Linear(16, 32),
)
optimizer = GaLoreAdamW(model, lr=1e-2, rank=4, gap=3)
with joma.Monitor(model, optimizer, every=2, run=sys.argv[1], budget=None) as monitor:
    for _ in range(8):
        tokens = torch.randint(32, (9, 4))
        loss = nn.functional.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        optimizer.step()
        monitor.step(loss)
        optimizer.zero_grad()
    torch.save(optimizer.state_dict(), sys.argv[1] + ".pt")
optimizer.load_state_dict(torch.load(sys.argv[1] + ".pt", weights_only=True))
metrics = set(Run.open(sys.argv[1]).metrics.read()["name"])
print(sorted({"loss", "stable_rank", "attention_entropy"} & metrics))
print("scipy" in sys.modules)

import os
from joma.train.processes import joined
os.environ["WORLD_SIZE"] = "2"
try:
    with joined():
        pass
except ValueError as error:
    print(error)
"""

SENTENCE = "several processes need torch.distributed, which this build of torch lacks"


def test_a_monitored_training_with_galore(tmp_path: Path):
    leave = "\nimport os\nsys.stdout.flush()\nos._exit(0)"  # torch's threads may abort an exit
    found = said(BUILT_WITHOUT + TRAINS + leave, tmp_path / "run")
    assert found == ["['attention_entropy', 'loss', 'stable_rank']", "False", SENTENCE]
