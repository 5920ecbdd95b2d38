"""The hub path with the real client libraries, against a small hub on loopback."""

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

if find_spec("datasets") is None:
    pytest.skip("datasets is not installed", allow_module_level=True)

COMMIT = "c" * 40
LOAD_CRITICS = """
import sys
from mas_gym.errors import MASGymError
from rewardmodels import load_critic
for spec in sys.argv[1:]:
    try:
        critic = load_critic(spec)
        print(critic.info.kind, *critic.info.tasks, critic.identity())
    except MASGymError as error:
        print(type(error).__name__, error)
"""
LOAD = """
import sys
from mas_gym.errors import MASGymError
from mas_gym.tasks import load_task
try:
    task = load_task(sys.argv[1], sys.argv[2])
    print(len(task), task[0].id, task[0].answer)
except MASGymError as error:
    print(type(error).__name__, error)
"""


def table(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def gsm8k_files() -> dict[str, bytes]:
    rows = [{"question": f"Question {n}?", "answer": f"#### {n}"} for n in range(40)]
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
    card += "  - split: test\n    path: main/test-*\n- config_name: socratic\n  data_files: socratic/*\n---\n"
    files = {f"main/{part}-00000-of-00001.parquet": table(rows[:size]) for part, size in (("train", 40), ("test", 7))}
    return {"README.md": card.encode(), "socratic/test-00000-of-00001.parquet": table(rows), **files}


def logiqa_files() -> dict[str, bytes]:
    row = {"context": "c", "query": "q", "options": ["w", "x", "y", "z"], "correct_option": 0}
    parts = {"train": 20, "validation": 3, "test": 5}
    return {f"default/{part}/0000.parquet": table([row] * size) for part, size in parts.items()}


REPOSITORIES: Mapping[str, dict[str, bytes]] = {
    "openai/gsm8k": gsm8k_files(),
    "lucasmccabe/logiqa": logiqa_files(),
}


EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "publish_critic.py"
PUBLISHED: dict[str, dict[str, bytes]] = {}
"""Files of the models that tests have published, by repository."""


class Hub(BaseHTTPRequestHandler):
    """Just enough of the hub's interface for `datasets.load_dataset`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = (
            self.path.split("?")[0].removeprefix("/api").removeprefix("/datasets/").removeprefix("/models/").lstrip("/")
        )
        known = {**REPOSITORIES, **PUBLISHED}
        name = next((name for name in known if path.startswith(name)), None)
        if name is None:
            return self.reply(404 if path else 200)
        files, rest = known[name], path.removeprefix(name).strip("/").replace("%2F", "/")
        rest = rest.replace("refs/convert/parquet", COMMIT)
        if rest.startswith("resolve/"):
            content = files.get(rest.split("/", 2)[2])
            if content is None:
                return self.reply(404, headers={"X-Error-Code": "EntryNotFound"})
            return self.reply(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        if rest.startswith("tree/"):
            return self.reply_json(self.tree(files, "/".join(rest.split("/")[2:])))
        return self.reply_json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0].removeprefix("/api")
        if path == "/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            PUBLISHED.setdefault(name, {})
            return self.reply_json({"url": f"http://{self.headers['Host']}/{name}"})
        if path == "/validate-yaml":
            return self.reply_json({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.reply_json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        name = path.removeprefix("/models/").removesuffix("/commit/main")
        if name not in PUBLISHED or name == path:
            return self.reply(404)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                PUBLISHED[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"
        return self.reply_json({"commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    def tree(self, files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
        deep = "recursive=true" in self.path.lower()
        entries = {}
        for path, content in files.items():
            inside = path.removeprefix(f"{folder}/") if folder else path
            if folder and inside == path:
                continue
            first, _, more = inside.partition("/")
            where = path if deep or not more else f"{folder}/{first}".lstrip("/")
            kind = "file" if where == path else "directory"
            entries[where] = {"type": kind, "oid": COMMIT, "size": len(content), "path": where}
        return list(entries.values())

    def reply_json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, code: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def load(endpoint: str, home: Path, *arguments: str, script: str = LOAD) -> str:
    # both variables are read when the client library is imported
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "hf_loopback"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_data_is_downloaded_once_and_then_cached(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    assert load(endpoint, tmp_path, "gsm8k", "test") == "7 gsm8k/test/0 0"
    train = load(endpoint, tmp_path, "gsm8k", "train")
    assert train.startswith("38 gsm8k/train/")
    assert load(endpoint, tmp_path, "logiqa", "test") == "5 logiqa/test/0 A"
    hub.shutdown()
    hub.server_close()
    assert load(endpoint, tmp_path, "gsm8k", "train") == train
    assert load(endpoint, tmp_path, "logiqa", "test") == "5 logiqa/test/0 A"


def test_unreachable_hub_without_a_cache_is_reported(tmp_path: Path) -> None:
    message = load("http://127.0.0.1:9", tmp_path, "mmlu", "test")
    assert message.startswith("DataNotFoundError no data for task 'mmlu': the hub cannot be reached")
    assert "Three ways to provide it:" in message


@pytest.mark.slow
def test_hub_data_set_loads_as_a_task(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    found = load(endpoint, tmp_path, "openai/gsm8k:main", "test")
    assert found.startswith("7 openai/gsm8k:main/") and found.endswith("#### 0")
    sizes = [int(load(endpoint, tmp_path, "openai/gsm8k:main", split).split()[0]) for split in ("train", "dev")]
    assert sum(sizes) == 40 and sizes[0] > sizes[1] > 0
    message = load(endpoint, tmp_path, "nobody/nothing", "test")
    assert message.startswith("DataNotFoundError no data for task 'nobody/nothing'") and "check the path or" in message


def test_missing_hub_data_is_reported(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    message = load(f"http://127.0.0.1:{hub.server_address[1]}", tmp_path, "mmlu", "test")
    assert message.startswith("DataNotFoundError no data for task 'mmlu': the hub did not return 'cais/mmlu'")


@pytest.mark.slow
def test_published_critic_loads_by_name(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    from rewardmodels.tiny_critics import shipped

    endpoint, home = f"http://127.0.0.1:{hub.server_address[1]}", tmp_path / "home"
    folder = tmp_path / "masprm"
    shutil.copytree(shipped("masprm"), folder)
    # Files that training leaves next to the model, and code that must not run.
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "optimizer.pt").write_bytes(b"state")
    (folder / "modeling_evil.py").write_text("raise SystemExit", encoding="utf-8")
    (folder / "README.md").unlink()

    PUBLISHED.clear()
    assert f"published at {endpoint}/lab/masprm\nmasprm: trained on arithmetic, for rpsv" in load(
        endpoint, home, str(folder), "lab/masprm", script=EXAMPLE.read_text(encoding="utf-8")
    )
    files = PUBLISHED["lab/masprm"]
    assert set(files) == {path.name for path in shipped("masprm").iterdir()}
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    assert 'load_critic("lab/masprm")' in card
    assert "arithmetic" in card and "Reader -> Planner -> Solver -> Verifier" in card and "## Training data" in card

    PUBLISHED["lab/masprm"]["evil.py"] = b"raise SystemExit"
    PUBLISHED["lab/other"] = {"config.json": b"{}"}
    specs = (str(folder), "lab/masprm", "lab/nothing", "lab/other")
    here, there, nothing, other = load(endpoint, home, *specs, script=LOAD_CRITICS).splitlines()
    assert here.startswith("masprm arithmetic ")
    assert there == here
    assert not list(home.rglob("evil.py"))
    assert nothing.startswith("DataNotFoundError no model 'lab/nothing': expected a folder, or a name on the hub")
    assert other.startswith("DataError 'lab/other' on the hub is not a MAS-Gym critic: expected critic.json")


def test_push_rejects_invalid_names_and_missing_folders(tmp_path: Path) -> None:
    from mas_gym.errors import ConfigError, DataNotFoundError
    from rewardmodels import push_to_hub

    with pytest.raises(ConfigError, match="hub name: expected org/name, got 'masprm'"):
        push_to_hub(tmp_path, "masprm")
    with pytest.raises(DataNotFoundError):
        push_to_hub(tmp_path / "nothing", "lab/masprm")


def test_mistyped_local_folder_is_not_requested_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mas_gym.errors import UnknownNameError
    from rewardmodels import load_critic

    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownNameError, match="expected a folder that training wrote"):
        load_critic("models/masprn")
