"""The routes of files: the replica catalogue, bundles of submitters, and results of jobs."""

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
from koalapy.api.agents import Tokens, check_agent_token
from koalapy.api.derived import view_model
from koalapy.api.fields import MAX_PAGE_SIZE, Cluster, FileName, Input, LogicalName, Output, Text
from koalapy.api.problems import problem, problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.auth.pace import Pace
from koalapy.daemon.files.bundles import Bundles
from koalapy.daemon.files.files import Files
from koalapy.daemon.files.results import ResultInputs, Results
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.errors import NotFoundError, ProblemCode
from koalapy.model.replica import Replica
from koalapy.model.request import Bundle
from koalapy.store.records import StoredResult

TAR = "application/x-tar"
MAX_OFFSET = 2**53
BODY = {"requestBody": {"required": True, "content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}}
INCOMPLETE = partial(
    problem, ProblemCode.INCOMPLETE_BODY, "the connection ended before the body did", field="body", hint="send it again"
)
STALLED = partial(
    problem, ProblemCode.BODY_TIMEOUT, "the body stopped before its end", field="body", hint="send it again"
)
Name = Annotated[Text | None, Query(min_length=1, max_length=1000, description="only this logical file")]
After = Annotated[Text, Query(max_length=1000, description="start with this logical file")]
AfterCluster = Annotated[Text, Query(max_length=100, description="and, for that file, after this cluster")]
Needed = Annotated[Text, Query(min_length=1, max_length=1000, description="the logical file")]
Where = Annotated[Text | None, Query(min_length=1, max_length=100, description="only on this cluster")]
Offset = Annotated[int, Query(ge=0, le=MAX_OFFSET, description="only the bytes from this one on")]
ArchiveVersion = Annotated[Text, Query(max_length=100, description="with offset: the ETag of the broken download")]
BundleId = Annotated[Text, Path(max_length=100, description="the bundle's id, the SHA-256 of the archive")]


class ReplicaOrder(Input):
    """A file or folder on a cluster to register as a replica of a logical file."""

    name: LogicalName
    cluster: Cluster
    path: FileName = Field(min_length=1, json_schema_extra={"pattern": r"^/[^\x00]*$"})
    """Absolute, on that cluster."""


class ReplicaChoice(Input):
    """A selection of replicas: all, those of a logical file, those on a cluster, or the one that matches both."""

    name: LogicalName | None = None
    cluster: Cluster | None = None


_Replica = view_model("_Replica", Replica, without={"parts"})


class ReplicaView(_Replica):  # type: ignore[misc, valid-type]
    """A replica; ``size`` in bytes, ``parts`` the number of entries of a folder, null for a file."""

    parts: Annotated[int | None, BeforeValidator(lambda parts: len(parts) if isinstance(parts, tuple) else parts)]


class ReplicaList(Output):
    replicas: list[ReplicaView]


class ReplicaPage(ReplicaList):
    next: str | None
    """Path of the next page; null on the last page."""


class VerifiedView(ReplicaView):
    problem: str
    """The reason for which it could not be verified; its state is then unchanged."""


class VerifiedList(Output):
    replicas: list[VerifiedView]


BundleView = view_model("BundleView", Bundle)
ResultView = view_model("ResultView", StoredResult, without={"at"})


def files_router(files: Files, bundles: Bundles, results: Results) -> APIRouter:
    """Return the routes of replicas, uploaded bundles and the result files of jobs."""
    router = api_router("files", "")
    _add_replicas(router, files)
    _add_bundles(router, bundles)

    @router.get(
        "/jobs/{job}/results",
        response_class=StreamingResponse,
        responses={200: {"content": {TAR: {}}, "description": "a folder RANK-CLUSTER for each component"}},
    )
    async def fetch_results(job: Id, offset: Offset = 0, version: ArchiveVersion = "") -> StreamingResponse:
        """Download the result files of the job's last attempt as one tar archive, or the rest of it."""
        version, pieces = await results.open_archive(job, offset, version)
        return StreamingResponse(pieces, media_type=TAR, headers={"ETag": f'"{version}"'})

    return router


def _add_replicas(router: APIRouter, files: Files) -> None:
    """Add the routes that list, register, verify and remove replicas."""

    @router.get("/replicas", response_model=ReplicaPage, responses=problem_responses(404))
    async def list_replicas(
        name: Name = None,
        after: After = "",
        after_cluster: AfterCluster = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = 100,
    ) -> Any:
        """List the replicas of logical files, in order of name and cluster."""
        replicas = files.list_replicas(
            name, (after, after_cluster), limit + 1
        )  # one more shows whether there is another page
        page, next_page = replicas[:limit], None
        if len(replicas) > limit:
            query: dict[str, Any] = {} if name is None else {"name": name}
            query |= {"after": page[-1].name, "after_cluster": page[-1].cluster, "limit": limit}
            next_page = f"/api/v1/replicas?{urlencode(query)}"
        return {"replicas": page, "next": next_page}

    @router.post("/replicas", status_code=201, response_model=ReplicaView, responses=problem_responses(409))
    async def add_replica(order: ReplicaOrder) -> Any:
        """Register a file or folder on a cluster as a replica. The cluster's agent reads it first, which may take
        minutes."""
        return await files.add_replica(order.name, order.cluster, order.path)

    @router.post("/replicas/verify", response_model=VerifiedList, responses=problem_responses(404))
    async def verify_replicas(choice: ReplicaChoice | None = None) -> Any:
        """Verify replicas by their agents, which may take minutes; replicas that are good again are used again."""
        choice = choice or ReplicaChoice()
        verified = await files.verify_replicas(choice.name, choice.cluster)
        return {"replicas": [asdict(v.replica) | {"problem": v.problem} for v in verified]}

    @router.delete("/replicas", response_model=ReplicaList, responses=problem_responses(404))
    async def remove_replicas(name: Needed, cluster: Where = None) -> Any:
        """Remove replicas of a logical file from the catalogue, and return them. The files themselves are not
        deleted."""
        return {"replicas": await files.remove_replicas(name, cluster)}


def _add_bundles(router: APIRouter, bundles: Bundles) -> None:
    """Add the routes that upload and show bundles."""

    @router.post(
        "/bundles",
        status_code=201,
        response_model=BundleView,
        openapi_extra=BODY,
        responses={
            200: {"model": BundleView, "description": "the daemon has this bundle already"},
            **problem_responses(408, 409, 507),
        },
    )
    async def upload_bundle(request: Request, response: Response, caller: Caller) -> Any:
        """Upload an uncompressed tar archive of regular files and folders. Jobs of the caller use it by its id as
        ``bundle``."""
        length = request.headers.get("content-length", "")
        try:
            announced = int(length[:20]) if length.isdecimal() else 0
            bundle, created = await bundles.add_bundle(request.stream(), announced, caller.user)
        except ClientDisconnect:
            return INCOMPLETE()
        except TimeoutError:
            return STALLED()
        describe_request(f"bundle {bundle.id}")
        response.status_code = 201 if created else 200
        return bundle

    @router.get("/bundles/{bundle}", response_model=BundleView)
    async def show_bundle(bundle: BundleId, caller: Caller) -> Any:
        """Show a bundle of the caller."""
        return bundles.touch_visible(caller, bundle)

    @router.head("/bundles/{bundle}", include_in_schema=False)
    async def has_bundle(bundle: BundleId, caller: Caller) -> Response:
        bundles.touch_visible(caller, bundle)
        return Response()


def agent_files_router(
    bundles: Bundles,
    results: Results,
    result_inputs: ResultInputs,
    tokens: Tokens,
    is_sent_to: Callable[[str, str], bool],
    attempts: Pace | None = None,
) -> APIRouter:
    """Return the routes by which agents download files and upload results, with the tokens of their clusters.

    ``is_sent_to``: returns whether a cluster (first argument) may download a bundle (second argument).
    """
    attempts = attempts or Pace()
    router = APIRouter(prefix="/api/v1/agents/{cluster}", include_in_schema=False)

    def reject(request: Request, cluster: str) -> Response | None:
        rejection = check_agent_token(request, cluster, tokens, attempts)
        return rejection.to_response() if rejection else None

    @router.get("/bundles/{bundle}")
    async def download(request: Request, cluster: str, bundle: BundleId) -> Response:
        """Download a bundle, or the part that a ``Range`` header asks for."""
        if rejection := reject(request, cluster):
            return rejection
        if not is_sent_to(cluster, bundle):
            raise NotFoundError(
                f"no job on {cluster} uses the bundle {bundle}",
                field="bundle",
                value=bundle,
                code=ProblemCode.BUNDLE_NOT_FOUND,
            )
        bundles.get_bundle(bundle)
        return FileResponse(bundles.path_of(bundle), media_type=TAR)

    @router.get("/inputs/{token}")
    async def download_inputs(request: Request, cluster: str, token: str) -> Response:
        """Download the results of other jobs that a component needs as one tar archive."""
        if rejection := reject(request, cluster):
            return rejection
        return StreamingResponse(await result_inputs.open_archive(cluster, token), media_type=TAR)

    @router.put("/results/{token}", response_model=ResultView)
    async def put(request: Request, cluster: str, token: str) -> Any:
        """Store the results of a component, and replace those of an earlier upload."""
        if rejection := reject(request, cluster):
            return rejection
        try:
            return await results.store_result(cluster, token, request.stream())
        except ClientDisconnect:
            return INCOMPLETE()
        except TimeoutError:
            return STALLED()

    return router
