"""A job as it is submitted: the JSON of ``POST /api/v1/jobs``, made of what the model says of a job's fields."""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from koalapy.api.derived import body_model
from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest

JobInput = body_model(
    "JobInput",
    InputFile,
    "A logical file of the replica catalogue for every component: the whole, or of a folder one entry for each.",
    without={"part"},
)
_OwnInput = body_model("ComponentInput", InputFile, "", without={"distribution"})


class ComponentInput(_OwnInput):  # type: ignore[misc, valid-type]
    """A logical file of the replica catalogue for one component, or one entry of it."""

    def to_model(self) -> InputFile:
        file: InputFile = super().to_model()
        return replace(file, distribution="whole" if file.part is None else "partitioned")


_own = {"inputs": ComponentInput}
FixedComponent = body_model(
    "FixedComponent", ComponentRequest, "A component with its cluster.", needs={"cluster"}, elements=_own
)
NonFixedComponent = body_model(
    "NonFixedComponent",
    ComponentRequest,
    "A component whose cluster the scheduler chooses.",
    without={"cluster"},
    elements=_own,
)
Fixed = body_model(
    "Fixed", FixedRequest, "Sizes and clusters are given.", needs={"type"}, elements={"components": FixedComponent}
)
NonFixed = body_model(
    "NonFixed", NonFixedRequest, "Sizes are given.", needs={"type"}, elements={"components": NonFixedComponent}
)
Flexible = body_model(
    "Flexible",
    FlexibleRequest,
    "The total is given; the scheduler chooses components and clusters within the bounds.",
    needs={"type"},
)
_requests: Any = Annotated[Fixed | NonFixed | Flexible, Field(discriminator="type")]
_Submission = body_model("JobSubmission", JobSpec, "", elements={"inputs": JobInput, "request": _requests})


class JobSubmission(_Submission):  # type: ignore[misc, valid-type]
    """A parallel job: what to run, and on how many nodes of which clusters."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "request": {"type": "flexible", "total_size": 6},
                    "command": ["python", "-m", "koalapy.apps.poisson"],
                    "name": "poisson",
                }
            ]
        }
    )
