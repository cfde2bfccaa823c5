"""The routes of files: the replica catalogue, submitters' bundles, and what jobs brought."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BeforeValidator, Field
from starlette.requests import ClientDisconnect

from koalapy.api.access import Caller, Id
from koalapy.api.agents import Tokens, refusal
from koalapy.api.derived import view_model
from koalapy.api.fields import Cluster, FileName, Input, LogicalName, Output, Text
from koalapy.api.jobs import MAX_PAGE_SIZE
from koalapy.api.problems import problem, problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.auth.pace import AgentAttempts
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import Results
from koalapy.daemon.observability.audit import about
from koalapy.model.errors import NotFoundError, ProblemCode
from koalapy.model.replica import Replica
from koalapy.model.request import Bundle
from koalapy.ports import StoredResult

TAR = "application/x-tar"
BODY = {"requestBody": {"required": True, "content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}}
CUT = partial(problem, ProblemCode.INCOMPLETE_BODY, "the body ended too early", field="body", hint="send it again")
STALLED = partial(problem, ProblemCode.BODY_TIMEOUT, "the body did not go on", field="body", hint="send it again")
Name = Annotated[Text | None, Query(min_length=1, max_length=1000, description="only of this logical file")]
After = Annotated[Text, Query(max_length=1000, description="only from this logical file on")]
AfterCluster = Annotated[Text, Query(max_length=100, description="and of that file only after this cluster")]
Needed = Annotated[Text, Query(min_length=1, max_length=1000, description="the logical file")]
Where = Annotated[Text | None, Query(min_length=1, max_length=100, description="only on this cluster")]
BundleId = Annotated[Text, Path(max_length=100, description="the bundle's id, the SHA-256 of the archive")]


def _count(parts: object) -> object:
    return len(parts) if isinstance(parts, tuple) else parts


class ReplicaOrder(Input):
    """A file or folder on a cluster that is to be a replica of a logical file."""

    name: LogicalName
    cluster: Cluster
    path: FileName = Field(min_length=1, json_schema_extra={"pattern": r"^/[^\x00]*$"})
    """Absolute, on that cluster."""


class ReplicaChoice(Input):
    """Which replicas: all, those of one logical file, those on one cluster, or the one that is both."""

    name: LogicalName | None = None
    cluster: Cluster | None = None


_Replica = view_model("_Replica", Replica, without={"parts"})


class ReplicaView(_Replica):  # type: ignore[misc, valid-type]
    """A replica; ``size`` in bytes, ``parts`` the number of entries of a folder, null for a file."""

    parts: Annotated[int | None, BeforeValidator(_count)]


class ReplicaList(Output):
    replicas: list[ReplicaView]


class ReplicaPage(ReplicaList):
    next: str | None
    """Where the next page is; null on the last."""


class VerifiedView(ReplicaView):
    problem: str
    """Why it could not be looked at; its state is then what was known before."""


class VerifiedList(Output):
    replicas: list[VerifiedView]


BundleView = view_model("BundleView", Bundle)
ResultView = view_model("ResultView", StoredResult, without={"at"})


def files_router(files: Files, bundles: Bundles, results: Results) -> APIRouter:
    router = api_router("files", "")
    _add_replicas(router, files)
    _add_bundles(router, bundles)

    @router.get(
        "/jobs/{job}/results",
        response_class=StreamingResponse,
        responses={200: {"content": {TAR: {}}, "description": "a folder RANK-CLUSTER for each component"}},
    )
    async def fetch_results(job: Id) -> StreamingResponse:
        """What the components of the job's last attempt brought, as one tar archive."""
        return StreamingResponse(await results.archive(job), media_type=TAR)

    return router


def _add_replicas(router: APIRouter, files: Files) -> None:
    @router.get("/replicas", response_model=ReplicaPage, responses=problem_responses(404))
    async def list_replicas(
        name: Name = None,
        after: After = "",
        after_cluster: AfterCluster = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = 100,
    ) -> Any:
        """The replica catalogue: which logical files there are, and where; in order of name and cluster."""
        # One more than asked for tells whether there is another page.
        found = files.list(name, (after, after_cluster), limit + 1)
        page = found[:limit]
        following = _next_page(name, page[-1], limit) if len(found) > limit else None
        return {"replicas": page, "next": following}

    @router.post("/replicas", status_code=201, response_model=ReplicaView, responses=problem_responses(409))
    async def add_replica(order: ReplicaOrder) -> Any:
        """Enter a file or folder on a cluster in the catalogue, once its agent has read it: that may take long."""
        return await files.add(order.name, order.cluster, order.path)

    @router.post("/replicas/verify", response_model=VerifiedList, responses=problem_responses(404))
    async def verify_replicas(choice: ReplicaChoice | None = None) -> Any:
        """Have agents look at replicas again, and use again what is good again: that may take long."""
        chosen = choice or ReplicaChoice()
        verified = await files.verify(chosen.name, chosen.cluster)
        return {"replicas": [asdict(v.replica) | {"problem": v.problem} for v in verified]}

    @router.delete("/replicas", response_model=ReplicaList, responses=problem_responses(404))
    async def remove_replicas(name: Needed, cluster: Where = None) -> Any:
        """Forget replicas of a logical file; the files themselves stay where they are. Answers what was forgotten."""
        return {"replicas": await files.remove(name, cluster)}


def _add_bundles(router: APIRouter, bundles: Bundles) -> None:
    @router.post(
        "/bundles",
        status_code=201,
        response_model=BundleView,
        openapi_extra=BODY,
        responses={
            200: {"model": BundleView, "description": "it was there already"},
            **problem_responses(408, 409, 507),
        },
    )
    async def upload_bundle(request: Request, response: Response, caller: Caller) -> Any:
        """Keep an uncompressed tar of regular files and folders for the caller's jobs to come; its id is for their
        ``bundle``."""
        length = request.headers.get("content-length", "")
        try:
            announced = int(length[:20]) if length.isdecimal() else 0
            bundle, created = await bundles.put(request.stream(), announced, caller.user)
        except ClientDisconnect:
            return CUT()
        except TimeoutError:
            return STALLED()
        about(f"bundle {bundle.id}")
        response.status_code = 201 if created else 200
        return bundle

    @router.get("/bundles/{bundle}", response_model=BundleView)
    async def show_bundle(bundle: BundleId, caller: Caller) -> Any:
        """Whether the daemon has a bundle of the caller's."""
        return bundles.wanted_by(caller, bundle)

    @router.head("/bundles/{bundle}", include_in_schema=False)
    async def has_bundle(bundle: BundleId, caller: Caller) -> Response:
        bundles.wanted_by(caller, bundle)
        return Response()


def agent_files_router(
    bundles: Bundles,
    results: Results,
    tokens: Tokens,
    is_sent_to: Callable[[str, str], bool],
    attempts: AgentAttempts | None = None,
) -> APIRouter:
    """For agents, who show the tokens of their clusters; ``is_sent_to`` tells whether a cluster is to have a bundle."""
    attempts = attempts or AgentAttempts()
    router = APIRouter(prefix="/api/v1/agents/{cluster}", include_in_schema=False)

    def sent_away(request: Request, cluster: str) -> Response | None:
        why = refusal(request, cluster, tokens, attempts)
        return why.answer() if why else None

    @router.get("/bundles/{bundle}")
    async def download(request: Request, cluster: str, bundle: BundleId) -> Response:
        """A bundle, or the rest of it (Range)."""
        if answer := sent_away(request, cluster):
            return answer
        if not is_sent_to(cluster, bundle):
            raise NotFoundError(
                f"no job on {cluster} has a bundle {bundle}",
                field="bundle",
                value=bundle,
                code=ProblemCode.BUNDLE_NOT_FOUND,
            )
        bundles.get(bundle)
        return FileResponse(bundles.path(bundle), media_type=TAR)

    @router.put("/results/{token}", response_model=ResultView)
    async def put(request: Request, cluster: str, token: str) -> Any:
        """What a component brought; again, in place of what came before."""
        if answer := sent_away(request, cluster):
            return answer
        try:
            return await results.put(cluster, token, request.stream())
        except ClientDisconnect:
            return CUT()
        except TimeoutError:
            return STALLED()

    return router


def _next_page(name: str | None, last: Replica, limit: int) -> str:
    query: dict[str, Any] = {} if name is None else {"name": name}
    query |= {"after": last.name, "after_cluster": last.cluster, "limit": limit}
    return f"/api/v1/replicas?{urlencode(query)}"
