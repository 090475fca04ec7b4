"""A small Hub on this machine: enough of its HTTP protocol for the real `huggingface_hub` and `datasets` clients.

Repositories with commits, private ones, tokens, LFS uploads, downloads with ranges; and faults on demand: a download
that breaks off, a server that refuses. It keeps everything in memory and notes every request.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_test"
USER = "ada"
LFS_ABOVE_BYTES = 1000  # small, so that tests go through the LFS protocol too

Key = tuple[str, str]
Files = dict[str, bytes]


@dataclass
class Repo:
    """One repository: commits in order, each with all of its files."""

    is_private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)

    def commit(self, changes: Files, deleted: Collection[str] = ()) -> str:
        kept = {name: data for name, data in (self.at("main") or {}).items() if name not in deleted}
        files = {**kept, **changes}
        content = repr(
            (len(self.commits), sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items()))
        )
        revision = hashlib.sha1(content.encode()).hexdigest()
        self.commits[revision] = files
        return revision

    def at(self, revision: str) -> Files | None:
        return self.commits.get(self.resolve(revision) or "")

    def resolve(self, revision: str) -> str | None:
        if revision == "main":
            return next(reversed(self.commits), None)
        return revision if revision in self.commits else None


class Hub:
    """The server's memory, and what a test may do to it."""

    def __init__(self) -> None:
        self.repos: dict[Key, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut_off: set[str] = set()
        """Names of files whose downloads break off in the middle."""
        self.refuse_commits = False
        self.before_commit: Callable[[], None] = lambda: None
        """Called when all files of a commit are there, and nothing is committed yet."""
        self.url = ""

    def add(self, kind: str, name: str, files: Files, *, is_private: bool = False) -> str:
        """A repository with one commit; returns the commit."""
        repo = self.repos.setdefault((kind, name), Repo(is_private))
        return repo.commit(files)


@contextlib.contextmanager
def serve_hub() -> Iterator[Hub]:
    """A Hub that listens on loopback; use `hub.url` as HF_ENDPOINT."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Refusal(Exception):
    """Becomes an HTTP error as the Hub sends it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Tests look at `hub.requests` instead."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        try:
            for pattern, action in ROUTES:
                if (match := re.fullmatch(pattern, f"{self.command} {path}")) is not None:
                    getattr(self, action)(body, **match.groupdict())
                    return
            raise Refusal(404, "", f"this Hub does not know {self.command} {path}")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code} if refusal.code else {}
            self._send(json.dumps({"error": str(refusal)}).encode(), refusal.status, **headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().strip(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content-Type", "application/json")
        headers.setdefault("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _json(self, value: object, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status)

    # --- who may do what ---

    @property
    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _need_token(self) -> None:
        if not self._is_known:
            raise Refusal(401, "", "Invalid username or password.")

    def _repo(self, kind: str | None, name: str) -> Repo:
        repo = self.hub.repos.get(((kind or "models/").rstrip("/"), name))
        if repo is None or (repo.is_private and not self._is_known):
            # as the Hub does: without a token, private and missing look alike
            raise Refusal(404 if self._is_known else 401, "RepoNotFound", "Repository not found")
        return repo

    def _files(self, kind: str | None, name: str, revision: str) -> tuple[str, Files]:
        repo = self._repo(kind, name)
        commit, files = repo.resolve(revision), repo.at(revision)
        if commit is None or files is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, files

    # --- routes ---

    def whoami(self, body: bytes) -> None:
        self._need_token()
        self._json({"name": USER, "type": "user", "orgs": []})

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        errors = [] if content.startswith("---\n") else [{"message": "a card begins with its metadata"}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self, body: bytes) -> None:
        self._need_token()
        wanted = json.loads(body)
        owner = wanted.get("organization") or USER
        if owner != USER:
            raise Refusal(403, "", f"You don't have the rights to create a model under the namespace {owner!r}")
        name, kind = f"{owner}/{wanted['name']}", f"{wanted.get('type') or 'model'}s"
        if (kind, name) in self.hub.repos:
            self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
            return
        repo = self.hub.repos[kind, name] = Repo(wanted.get("visibility") == "private" or bool(wanted.get("private")))
        repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def preupload(self, body: bytes, kind: str, name: str, revision: str) -> None:
        self._need_token()
        self._files(kind, name, revision)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] > LFS_ABOVE_BYTES else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        self._json({"files": modes})

    def lfs_batch(self, body: bytes, kind: str | None, name: str) -> None:
        self._need_token()
        self._repo(kind, name)
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.url}/lfs/{item['oid']}", "header": {}}
            verify = {"href": f"{self.hub.url}/lfs-verify", "header": {}}
            known = item["oid"] in self.hub.lfs
            objects.append({**item, "actions": {"upload": upload, "verify": verify}} if not known else item)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "", "these bytes have another hash")
        self.hub.lfs[oid] = body
        self._send(b"")

    def lfs_verify(self, body: bytes) -> None:
        wanted = json.loads(body)
        if len(self.hub.lfs.get(wanted["oid"], b"")) != wanted["size"]:
            raise Refusal(404, "", "no such object")
        self._json({})

    def commit(self, body: bytes, kind: str, name: str, revision: str) -> None:
        self._need_token()
        if self.hub.refuse_commits:
            raise Refusal(403, "", "You don't have the rights to push to this repo")
        repo = self._repo(kind, name)
        self.hub.before_commit()
        changes: Files = {}
        deleted: list[str] = []
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit") not in (None, repo.resolve("main")):
                raise Refusal(412, "", "A commit has happened since. Please refresh and try again.")
            if item["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "deletedFile":
                deleted.append(value["path"])
            elif item["key"] == "lfsFile":
                changes[value["path"]] = self.hub.lfs[value["oid"]]
        commit = repo.commit(changes, deleted)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def info(self, body: bytes, kind: str, name: str, revision: str | None = None) -> None:
        commit, files = self._files(kind, name, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(files)]
        private = self._repo(kind, name).is_private
        self._json({"id": name, "sha": commit, "private": private, "siblings": siblings, "tags": [], "downloads": 0})

    def commits(self, body: bytes, kind: str, name: str, revision: str) -> None:
        self._files(kind, name, revision)
        listed = reversed(self._repo(kind, name).commits)
        date = "2026-01-01T00:00:00.000Z"
        self._json([{"id": commit, "title": "", "message": "", "date": date, "authors": []} for commit in listed])

    def tree(self, body: bytes, kind: str, name: str, revision: str, path: str | None = None) -> None:
        _, files = self._files(kind, name, revision)
        prefix = f"{path.strip('/')}/" if path else ""
        below = {file: data for file, data in files.items() if file.startswith(prefix)}
        if path and not below:
            raise Refusal(404, "EntryNotFound", f"{path} does not exist")
        is_deep = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        entries: dict[str, dict[str, Any]] = {}
        for file, data in sorted(below.items()):
            folder, slash, _ = file[len(prefix) :].partition("/")
            if slash:
                entries[prefix + folder] = {"type": "directory", "path": prefix + folder, "oid": "0" * 40, "size": 0}
            if is_deep or not slash:
                entries[file] = self._entry(file, data)
        self._json(list(entries.values()))

    def paths_info(self, body: bytes, kind: str, name: str, revision: str) -> None:
        _, files = self._files(kind, name, revision)
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(body)["paths"]
        else:
            paths = parse_qs(body.decode()).get("paths", [])
        found: list[dict[str, Any]] = []
        for path in paths:
            if path in files:
                found.append(self._entry(path, files[path]))
            elif any(file.startswith(f"{path.strip('/')}/") for file in files):
                found.append({"type": "directory", "path": path, "oid": "0" * 40, "size": 0})
        self._json(found)

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if len(data) > LFS_ABOVE_BYTES:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def resolve(self, body: bytes, kind: str | None, name: str, revision: str, path: str) -> None:
        commit, files = self._files(kind, name, revision)
        if path not in files:
            raise Refusal(404, "EntryNotFound", f"{path} does not exist")
        data = files[path]
        digest = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        headers["Content-Type"] = "application/octet-stream"
        if len(data) > LFS_ABOVE_BYTES:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
        status, part = 200, data
        if (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) is not None:
            start, end = int(wanted[1]), int(wanted[2] or len(data) - 1)
            status, part = 206, data[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
        if path in self.hub.cut_off and self.command == "GET":
            self._send(part[: len(part) // 2], status, **headers, Content_Length=str(len(part)))
            self.close_connection = True
            return
        self._send(part, status, **headers)


_REPO = r"(?P<name>[\w.-]+/[\w.-]+)"
_API = rf"/api/(?P<kind>models|datasets)/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/validate-yaml", "validate_yaml"),
    (r"POST /api/repos/create", "create"),
    (rf"POST {_API}/preupload/{_REVISION}", "preupload"),
    (rf"POST /(?P<kind>datasets/)?{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    (r"PUT /lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    (r"POST /lfs-verify", "lfs_verify"),
    (rf"POST {_API}/commit/{_REVISION}", "commit"),
    (rf"(?:GET|HEAD) {_API}", "info"),
    (rf"(?:GET|HEAD) {_API}/revision/{_REVISION}", "info"),
    (rf"GET {_API}/commits/{_REVISION}", "commits"),
    (rf"GET {_API}/tree/{_REVISION}(?P<path>/.*)?", "tree"),
    (rf"POST {_API}/paths-info/{_REVISION}", "paths_info"),
    (rf"(?:GET|HEAD) /(?P<kind>datasets/)?{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
]
