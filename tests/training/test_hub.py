"""Runs on a model hub: pushed to a server of its protocol, and used from there."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading

import numpy as np
import pytest

import mbx
from mbx import cli
from mbx.analysis import runs
from mbx.training import hub, run, rundir
from tests.helpers import leave_untrained, tiny_config
from tests.training.test_policy import SPEC

URL = "hf://me/pendulum"


class Server(http.server.BaseHTTPRequestHandler):
    """The endpoints that the library calls to create, fill, list and read a repository."""

    files: dict[str, bytes]
    exists: bool
    failing = 0

    def log_message(self, *_):
        pass

    def answer(self, value, status=200, **headers):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, one in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), one)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def commit(self):
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.failing or self.headers.get("Authorization") != "Bearer hf_writes":
            return self.answer({"error": "no"}, self.failing or 401)
        if self.path == "/api/repos/create":
            type(self).exists = True
            return self.answer({"url": f"http://{self.headers['Host']}/me/pendulum"})
        if "preupload" in self.path:
            paths = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]
            return self.answer({"files": modes})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del self.files[value["path"]]
            oid = self.commit()
            page = f"http://{self.headers['Host']}/me/pendulum/commit/{oid}"
            return self.answer({"commitUrl": page, "commitOid": oid})
        return self.answer({})  # validation of the card

    def do_GET(self):
        if self.failing or not self.exists:
            return self.answer({"error": "no"}, self.failing or 404)
        if match := re.match(r"/me/pendulum/resolve/\w+/(.*)", self.path):
            data = self.files[match[1]]
            tag = hashlib.sha1(data).hexdigest()
            return self.answer(data, ETag=f'"{tag}"', X_Repo_Commit=self.commit())
        if "/tree/" in self.path:
            return self.answer(
                [
                    {"type": "file", "path": p, "size": len(x), "oid": hashlib.sha1(x).hexdigest()}
                    for p, x in self.files.items()
                ]
            )
        siblings = [{"rfilename": path} for path in self.files]
        return self.answer({"id": "me/pendulum", "sha": self.commit(), "siblings": siblings})

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    handler = type("Handler", (Server,), dict(files={}, exists=False))
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{found.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield handler
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "run"
    leave_untrained(str(path), tiny_config(env=dict(name="gone:x")), SPEC)
    rows = [
        dict(kind="eval", step=s, return_mean=x, return_std=2.0)
        for s, x in ((5, 7.5), (7, None), (9, 1))
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    attempt = dict(command="mbx train --config=tdmpc", commit="1a2b3c4", versions={"mbx": "0.2.0"})
    (path / "run.json").write_text(json.dumps({"attempts": [attempt]}))
    (path / "checkpoints").mkdir(exist_ok=True)
    (path / "checkpoints" / "replay").write_text("large")
    return str(path)


def test_pushed_and_used_by_its_name(server, workdir, capsys):
    cli.run(["push", workdir, URL])
    assert capsys.readouterr().out.strip().endswith("me/pendulum")
    assert "config.json" in server.files and not any("checkpoints" in x for x in server.files)
    card = server.files["README.md"].decode()
    for words in ("7.5 ± 2", "step 5, the best of 2", "mbx train --config=tdmpc"):
        assert words in card and f"mbx evaluate {URL}" in card
    policy, own = mbx.load_policy(URL, planner=False), mbx.load_policy(workdir, planner=False)
    np.testing.assert_array_equal(policy([0.1, 0.2]), own([0.1, 0.2]))
    (path,) = runs.find_runs([URL])
    assert rundir.load_config(path) == rundir.load_config(workdir)
    with pytest.raises(SystemExit, match="init_from"):
        cli.run(["train", f"--workdir={URL}", "--config.resume=True"])

    # Another commit replaces files; without the server the last one is used.
    server.files |= {"inputs/old.yaml": b"old", "notes.md": b"not a run's"}
    hub.push(workdir, URL)
    assert "inputs/old.yaml" not in server.files and "notes.md" in server.files
    path = hub.local(URL)
    server.failing = 503
    assert hub.local(URL) == path


def test_errors_are_a_sentence(server, workdir, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="hf://me/pendulum is not downloaded, .* 404: correct"):
        run.load(URL)
    with pytest.raises(ValueError, match="hf://me names no run on a hub: give hf://USER/NAME"):
        hub.local("hf://me")
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        hub.push(str(tmp_path), URL)
    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    with pytest.raises(SystemExit, match="is not uploaded, .* 401: .* HF_TOKEN"):
        cli.run(["push", workdir, URL])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for call in (hub.local, lambda url: hub.push(workdir, url)):
        with pytest.raises(OSError, match="it cannot be reached: check the network, HF_ENDPOINT"):
            call(URL)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'mbx-rl\[hub\]'"):
        hub.local(URL)


def test_a_stranger_s_file_of_a_trusted_name(server, tmp_path, monkeypatch):
    """What this user trains with is trusted by name in their own runs, not in downloaded ones."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    rundir.remember_trusted("gym:cart.py:Cart")
    rundir.check_trusted("gym:cart.py:Cart", str(tmp_path / "own"), False)
    with pytest.raises(ValueError, match="--trust"):
        rundir.check_trusted("gym:cart.py:Cart", f"{rundir.downloads()}/me--x/1", False)
