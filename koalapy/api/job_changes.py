"""Changes of waiting jobs: the request body, its application to a job, and the body for a change that is offered."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from koalapy.api import fields
from koalapy.api.derived import body_model
from koalapy.api.fields import as_json
from koalapy.api.job_views import JobSubmission, job_view
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.errors import reject
from koalapy.model.field import describe_fields
from koalapy.model.job import Job
from koalapy.model.job_spec import CHANGEABLE_FIELDS, JobSpec
from koalapy.model.request import (
    MAX_COMPONENTS,
    ComponentRequest,
    FixedRequest,
    FlexibleRequest,
    NonFixedRequest,
    Request,
    RequestType,
    has_settings,
)
from koalapy.policies.registry import DEFAULTS

Json = dict[str, Any]
ComponentPatch = body_model(
    "ComponentPatch", ComponentRequest, "The size of a component, and its cluster.", only={"size", "cluster"}
)
_RequestPatch = body_model("_RequestPatch", FlexibleRequest, "", without={"type"}, is_change=True)


class RequestPatch(_RequestPatch):  # type: ignore[misc, valid-type]
    """The changed fields of a request."""

    type: RequestType | None = None
    """The other fields of a request do not stay if this differs."""
    components: Annotated[list[ComponentPatch], Field(min_length=1, max_length=MAX_COMPONENTS)] | None = None  # type: ignore[valid-type]
    """All components of a fixed or nonfixed request."""

    def apply_to(self, request: Request) -> Request:
        """Return the changed request. Raise ``UsageError`` for fields that the kind of request does not have."""
        kind, values = self.type or request.type, self.field_values("type")
        with_settings = () if isinstance(request, FlexibleRequest) else tuple(filter(has_settings, request.components))
        if with_settings and kind == "flexible":
            problem = "is flexible, but components of the job have settings of their own"
            reject("request.type", kind, problem, "change the sizes or clusters of its components")
        if kind == "flexible":
            if self.components is not None:
                hint = "leave it out, or set type to fixed or nonfixed"
                reject("request.components", len(self.components), "is given, but the request is flexible", hint)
            base = request if isinstance(request, FlexibleRequest) else FlexibleRequest(request.total_size)
            return replace(base, **_with_defaults(FlexibleRequest, {"total_size": base.total_size, **values}))
        if name := next(iter(values), None):
            hint = "leave it out, or set type to flexible"
            reject(f"request.{name}", values[name], f"is given, but the request is {kind}", hint)
        components = self._components_of(request, bool(with_settings))
        if kind == "nonfixed" and self.components is None:
            components = tuple(replace(component, cluster=None) for component in components)
        return FixedRequest(components) if kind == "fixed" else NonFixedRequest(components)

    def _components_of(self, request: Request, have_settings: bool) -> tuple[ComponentRequest, ...]:
        """Return the changed components. Each keeps its other settings, if it has any."""
        present = () if isinstance(request, FlexibleRequest) else request.components
        if self.components is None:
            if not present:
                reject("request.components", [], "is missing", "give the size of each component")
            return present
        bodies: list[Any] = self.components
        changed: tuple[ComponentRequest, ...] = tuple(body.to_model() for body in bodies)
        if not have_settings:
            return changed
        if len(changed) != len(present):
            problem = (
                f"has {len(changed)} entries, but the job has {len(present)} components with settings of their own"
            )
            reject("request.components", len(changed), problem, "give an entry for each component")
        pairs = zip(present, changed, strict=True)
        return tuple(replace(old, size=new.size, cluster=new.cluster) for old, new in pairs)


_JobPatch = body_model(
    "_JobPatch", JobSpec, "", only=[name for name in CHANGEABLE_FIELDS if name != "request"], is_change=True
)


class JobPatch(_JobPatch):  # type: ignore[misc, valid-type]
    """The changed fields of a waiting job. Fields that are left out stay; null means the default."""

    request: RequestPatch | None = None
    reason: fields.Reason = ""
    """Shown in the job's timeline. Required for the job of another user."""

    def apply_to(self, spec: JobSpec) -> JobSpec:
        """Return the changed specification, not validated. Raise ``UsageError`` for a contradiction in itself."""
        values = _with_defaults(JobSpec, self.field_values("request"))
        if self.request is not None:
            values["request"] = request = self.request.apply_to(spec.request)
            if isinstance(request, FlexibleRequest) != isinstance(spec.request, FlexibleRequest) and spec.inputs:
                reject("request.type", request.type, f"is {request.type}, but the job has inputs", "leave it out")
            if request.type != spec.request.type and spec.policy == DEFAULTS[spec.request.type]:
                values.setdefault("policy", "")
        if "policy" in values and values["policy"] != spec.policy:
            values.setdefault("policy_options", ())
        changed = spec.with_fields(**values)
        return changed if changed.policy else changed.with_fields(policy=DEFAULTS[changed.request.type])


def _with_defaults(kind: Any, values: Mapping[str, Any]) -> Json:
    """Return values with the default of its field for each None. Raise ``UsageError`` if there is none."""
    described = describe_fields(kind)
    if values.get("total_size", 1) is None:
        reject("request.total_size", None, "is null", "give a number of nodes, or leave it out")
    return {name: described[name].default if value is None else value for name, value in values.items()}


def submission_of(spec: JobSpec) -> Json:
    """Return the submission of a job specification, without fields that have their defaults."""
    if spec.policy == DEFAULTS[spec.request.type]:
        spec = replace(spec, policy="")
    view = as_json(job_view(JobRecord(Job(0, spec, 0.0), "")))
    submission = JobSubmission.model_validate({name: view[name] for name in JobSubmission.model_fields})
    return dict(submission.model_dump(mode="json", exclude_defaults=True, by_alias=True))


def change_between(old: JobSpec, new: JobSpec) -> Json:
    """Return the body of a change that makes one specification another."""
    old_body, new_body = ({"request": {}, **submission_of(spec)} for spec in (old, new))
    change = _differing(old_body, new_body, CHANGEABLE_FIELDS)
    if "request" in change:
        if old_body["request"]["type"] == new_body["request"]["type"] == "flexible":
            change["request"] = _differing(old_body["request"], new_body["request"], describe_fields(FlexibleRequest))
        elif components := new_body["request"].get("components"):
            names = ("size", "cluster")
            sizes = [{name: component[name] for name in names if name in component} for component in components]
            change["request"] = {"type": new_body["request"]["type"], "components": sizes}
    return change


def _differing(old: Json, new: Json, names: Mapping[str, Any] | tuple[str, ...]) -> Json:
    """Return the values after a change of those fields that differ; None for a default."""
    return {name: new.get(name) for name in names if old.get(name) != new.get(name)}
