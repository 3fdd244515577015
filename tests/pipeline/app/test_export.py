"""creditgraph export: a run's weights as a folder that transformers loads."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from creditgraph.components.rollouts.continuing import Begun
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.commands.train import train
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.run.checkpoint import Checkpoints
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


@pytest.fixture
def export(capsys):
    """Runs the command; returns exit code and what it printed."""

    def call(*arguments):
        code = main(["export", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    settings = [
        "recipe=toy_grpo",
        "prompts.batch=2",
        "evaluator.num_problems=2",
        "run.iterations=2",
        "run.wandb.mode=disabled",
    ]
    train(build_experiment(compose([*settings, f"run.root={root}", "run.name=toy"])))
    return root / "toy"


def test_the_exported_folder_holds_the_published_weights(export, run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, said = export(run, "--output", tmp_path / "model", "--shard-gb", "0.0003")
    assert code == 0, said
    assert "weights of version 2" in said
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) > 0
    trained = Checkpoints(run / "checkpoints").latest().groups["node.learner"]["optimizer"]["masters"]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in trained.items())


def test_prompts_in_flight_of_a_class_that_is_not_imported_are_left_alone(export, tmp_path, monkeypatch):
    small = ["prompts.batch=2", "evaluator.num_problems=2", "run.iterations=1", f"run.root={tmp_path}", "run.name=r"]
    train(build_experiment(compose(["recipe=toy_grpo_partial", *small])))
    monkeypatch.setattr(Begun, "__module__", "elsewhere")
    with pytest.raises(RunError, match=r"continuing:Begun' is not known here"):
        Checkpoints(tmp_path / "r" / "checkpoints").latest()
    code, said = export(tmp_path / "r", "--output", tmp_path / "model")
    assert code == 0
    assert "38 tensors" in said


def test_mistakes_get_sentences(export, run, tmp_path):
    for arguments, part in (
        ((run, "--output", tmp_path), "exists; expected a new folder"),
        ((tmp_path, "--output", tmp_path / "x"), "expected the directory of a run"),
        ((run, "--output", tmp_path / "x", "--iteration", 7), "not a readable checkpoint"),
    ):
        code, said = export(*arguments)
        assert code == 2
        assert part in said
    assert not (tmp_path / "x").exists()


class Hub(BaseHTTPRequestHandler):
    """The hub's calls of an upload: a repository, how to send each file, large ones apart, one commit."""

    def do_GET(self):
        self.reply({"type": "user", "name": "me", "orgs": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            mode = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            self.reply({"files": [{"path": p, "uploadMode": mode[p], "shouldIgnore": False} for p in paths]})
        elif self.path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            uploads = [{"upload": {"href": f"{self.server.url}/put/{o['oid']}"}} for o in objects]
            answers = [{**o, "authenticated": True, "actions": a} for o, a in zip(objects, uploads, strict=True)]
            self.reply({"transfer": "basic", "objects": answers})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.large[value["oid"]]
            self.reply({"commitUrl": f"{self.server.url}/me/toy/commit/1", "commitOid": "1", "success": True})
        elif self.path.endswith("/validate-yaml"):
            self.reply({"errors": [], "warnings": []})
        else:
            self.server.made.append((self.headers["Authorization"], json.loads(body)))
            self.reply({"url": f"{self.server.url}/me/toy", "name": "me/toy"})

    def do_PUT(self):
        self.server.large[self.path.split("/")[-1]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply({})

    def reply(self, content):
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.files, server.large, server.made = {}, {}, []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def push(run, folder, **environment):
    # Its settings are read when it is imported.
    command = [sys.executable, "-m", "creditgraph", "export", str(run), "--output", str(folder), "--push", "me/toy"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_a_pushed_model_is_the_exported_folder_with_its_card(run, tmp_path, hub):
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    done = push(run, tmp_path / "model", **settings)
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.url}/me/toy" in done.stdout
    ((token, made),) = hub.made
    assert (token, made["name"], made["visibility"]) == ("Bearer hf_x", "toy", "private")
    local = {
        str(f.relative_to(tmp_path / "model")): f.read_bytes() for f in (tmp_path / "model").rglob("*") if f.is_file()
    }
    assert {name: hub.files[name] for name in local} == local
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in ("| recipe | toy_grpo |", "| iterations | 2 of 2 |", "| seed | 0 |", "| base model | tiny |", "commit"):
        assert line in card, line


def test_a_push_without_a_hub_leaves_the_folder(run, tmp_path):
    done = push(run, tmp_path / "model", HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert f"{tmp_path / 'model'} is written. Log in with `hf auth login`" in done.stderr
    assert (tmp_path / "model" / "README.md").exists()
