"""The page, the API, the metrics and the WebSocket. Everything is to be read, nothing to be changed."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

import segno
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.datastructures import Headers

from collab_core import __version__
from collab_dashboard.broadcast import MAX_CLIENTS, Broadcast
from collab_dashboard.metrics import CONTENT_TYPE, prometheus_text
from collab_dashboard.shapes import EventView, HistoryView, PeerView, RunSummary, RunView
from collab_dashboard.watch import RunWatch

FILES = {
    "style.css": "text/css; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "parts.js": "text/javascript; charset=utf-8",
    "theme.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FULL = f"{MAX_CLIENTS} others are looking on already, and more this machine does not serve. Try again in a minute."
TRY_AGAIN_LATER = 1013  # as a WebSocket says it
NOT_ALLOWED = 1008

_DESCRIPTION = (
    "What the peers of a run publish about it, in signed records; nothing here changes anything. "
    "`/ws` is a WebSocket that sends the whole document first, then once per second what changed in it, "
    "as a JSON Merge Patch (RFC 7396)."
)


def make_app(watches: Sequence[RunWatch], *, is_local: bool) -> FastAPI:
    """The web application.

    Args:
        watches: the runs.
        is_local: only for this machine; then a request that came by another name is refused, so that a web page
            elsewhere cannot read along by giving its own name our address.
    """
    broadcast = Broadcast(watches)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with broadcast.running():
            yield

    app = FastAPI(
        title="Collab dashboard",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        openapi_url="/api/openapi.json",
        lifespan=lifespan,
    )
    app.state.broadcast = broadcast

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if is_local and not _is_local_name(request.headers):
            response: Response = PlainTextResponse("This dashboard is only for the machine it runs on.\n", 421)
        else:
            response = await answer(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    _add_page(app)
    _add_api(app, broadcast)

    @app.websocket("/ws")
    async def listen(socket: WebSocket) -> None:
        if not _is_same_origin(socket.headers) or (is_local and not _is_local_name(socket.headers)):
            await socket.close(NOT_ALLOWED, "Only this dashboard's own page may listen.")
            return
        await socket.accept()
        client = broadcast.enter()
        if client is None:
            await socket.close(TRY_AGAIN_LATER, FULL)
            return
        deaf = asyncio.create_task(_wait_for_the_end(socket))
        try:
            while not deaf.done():
                waiting = asyncio.create_task(client.get())
                await asyncio.wait([waiting, deaf], return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    break
                if (message := waiting.result()) is None:
                    with contextlib.suppress(RuntimeError):
                        await socket.close(TRY_AGAIN_LATER, "The connection is too slow, or the dashboard ends.")
                    break
                await socket.send_text(message)
        except (RuntimeError, OSError):
            pass  # the browser is gone, in the middle of a message
        finally:
            broadcast.leave(client)
            deaf.cancel()

    return app


async def _wait_for_the_end(socket: WebSocket) -> None:
    """Whoever says anything at all is let go: here one only listens."""
    message = await socket.receive()
    if message["type"] != "websocket.disconnect":
        with contextlib.suppress(RuntimeError):
            await socket.close(NOT_ALLOWED, "This socket only tells.")


def _add_page(app: FastAPI) -> None:
    page = resources.files("collab_dashboard") / "page"

    def file(name: str, kind: str) -> None:
        content = (page / name).read_bytes()

        @app.get(f"/{name}", include_in_schema=False, name=name)
        async def answer() -> Response:
            return Response(content, media_type=kind)

    for name, kind in FILES.items():
        file(name, kind)
    index, api = (page / "index.html").read_text(), (page / "api.html").read_text()

    @app.get("/", include_in_schema=False)
    async def the_page() -> HTMLResponse:
        return HTMLResponse(index)

    @app.get("/api", include_in_schema=False)
    async def the_api() -> HTMLResponse:
        rows = []
        for path, methods in app.openapi()["paths"].items():
            what = methods["get"].get("description", "")
            rows.append(f"<dt><code>{path}</code></dt><dd>{what}</dd>")
        return HTMLResponse(api.replace("<!-- paths -->", "\n".join(rows)))


def _add_api(app: FastAPI, broadcast: Broadcast) -> None:
    def found(run_id: str) -> RunView:
        """A run by its ID, the beginning of it, or its name."""
        runs = broadcast.runs.values()
        matches = [run for run in runs if run.run_id == run_id or run.name == run_id]
        matches = matches or [run for run in runs if len(run_id) >= 8 and run.run_id.startswith(run_id)]
        if len(matches) != 1:
            raise HTTPException(404, "There is no such run here, or more than one; /api/runs lists them.")
        return matches[0]

    @app.get("/api/runs")
    async def runs() -> list[RunSummary]:
        """All runs that are shown here."""
        return [RunSummary.model_validate(run.model_dump(include=set(RunSummary.model_fields))) for run in _all()]

    def _all() -> list[RunView]:
        return list(broadcast.runs.values())

    @app.get("/api/runs/{run_id}")
    async def run(run_id: str) -> RunView:
        """One run, by its ID, the first 8 or more letters of it, or its name: everything."""
        return found(run_id)

    @app.get("/api/runs/{run_id}/peers")
    async def peers(run_id: str) -> list[PeerView]:
        """Who is there, and who was there in the last hour."""
        return list(found(run_id).peers.values())

    @app.get("/api/runs/{run_id}/history")
    async def history(run_id: str) -> HistoryView:
        """Loss, speed and trainers by time."""
        return found(run_id).history

    @app.get("/api/runs/{run_id}/events")
    async def events(run_id: str) -> list[EventView]:
        """What happened, in words, oldest first."""
        return list(found(run_id).events.values())

    @app.get("/api/runs/{run_id}/invite.svg", response_class=Response)
    async def invite(run_id: str) -> Response:
        """The invite as a QR code."""
        return Response(qr_code(found(run_id).invite), media_type="image/svg+xml")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(prometheus_text(_all(), broadcast.num_clients), media_type=CONTENT_TYPE)


def qr_code(text: str) -> bytes:
    """Black on white in every theme: many cameras do not read the inverse."""
    picture = io.BytesIO()
    try:
        code = segno.make_qr(text, error="l")
    except segno.DataOverflowError:
        raise HTTPException(404, "The invite has so many addresses that no QR code can hold it; copy it.") from None
    code.save(picture, kind="svg", border=3, dark="#000", light="#fff", xmldecl=False, omitsize=True)
    return picture.getvalue()


def _host(headers: Headers) -> str:
    return _parts(f"//{headers.get('host', '')}").hostname or ""


def _parts(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:  # nonsense is nowhere
        return urlsplit("")


def _is_local_name(headers: Headers) -> bool:
    host = _host(headers)
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_same_origin(headers: Headers) -> bool:
    """A browser says from which page it comes; what is not a browser may say nothing."""
    origin = headers.get("origin")
    return origin is None or _parts(origin).netloc == headers.get("host")
