import json, pathlib
import numpy as np
def load_fixture(group, name):
    root = pathlib.Path(__file__).parent / "fixtures" / group
    return dict(np.load(root / f"{name}.npz")), json.loads((root / f"{name}.json").read_text())["config"]
