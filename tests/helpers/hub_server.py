"""A stand-in for the Hugging Face Hub on this machine: repositories in memory, behind the calls that its client makes."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_standin"


class Hub:
    """Repositories by name, each a dict of files; `requests` is what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.address = ""

    def commit(self, repo: str) -> str:
        """The commit's hash, by what the repository holds."""
        digest = hashlib.sha1()
        for name, data in sorted(self.repos[repo].items()):
            digest.update(name.encode() + data)
        return digest.hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A Hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Create a repository, say how files are to be uploaded, take a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._note()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.private.setdefault(name, bool(asked.get("private")) or asked.get("visibility") == "private")
            known = name in self.hub.repos
            self.hub.repos.setdefault(name, {})
            return self._answer(409 if known else 200, {"url": f"{self.hub.address}/{name}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            large = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            answers = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in large.items()]
            return self._answer(200, {"files": answers})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": one["oid"],
                    "size": one["size"],
                    "actions": {"upload": {"href": f"{self.hub.address}/lfs/{one['oid']}", "header": {}}},
                }
                for one in json.loads(body)["objects"]
            ]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.decode().splitlines():
                self._take(repo, json.loads(line))
            head = self.hub.commit(repo)
            url = f"{self.hub.address}/{repo}/commit/{head}"
            return self._answer(200, {"commitUrl": url, "commitOid": head, "hookOutput": ""})
        return self._answer(404, {"error": path})

    def do_PUT(self) -> None:
        """Take a large file."""
        path = self._note()
        self.hub.large[path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {})

    def do_HEAD(self) -> None:
        """Say how large a file is, and which."""
        self._file(head=True)

    def do_GET(self) -> None:
        """A repository's list of files, or a file."""
        path = self._note()
        if not path.startswith("/api/models/"):
            return self._file(head=False)
        repo = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        if repo not in self.hub.repos:
            return self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        head = self.hub.commit(repo)
        if "/tree/" in path:
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in sorted(self.hub.repos[repo].items())
            ]
            return self._answer(200, files)
        revision = path.rpartition("/revision/")[2]
        if "/revision/" in path and revision not in ("main", head):
            return self._answer(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in sorted(self.hub.repos[repo])]
        return self._answer(200, {"id": repo, "modelId": repo, "sha": head, "siblings": siblings, "private": False})

    def _take(self, repo: str, operation: dict[str, Any]) -> None:
        value = operation["value"]
        if operation["key"] == "file":
            self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            self.hub.repos[repo][value["path"]] = self.hub.large[value["oid"]]

    def _file(self, head: bool) -> None:
        path = self._note() if head else unquote(urlsplit(self.path).path)
        repo, _, rest = path.strip("/").partition("/resolve/")
        _, _, name = rest.partition("/")
        files = self.hub.repos.get(repo, {})
        if name not in files:
            return self._answer(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        commit = {"X-Repo-Commit": self.hub.commit(repo), "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'}
        return self._answer(200, files[name], {"Content-Type": "application/octet-stream", **commit})

    def _note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        return path

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
