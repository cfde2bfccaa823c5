"""The fields of a submission, each by itself."""

from koalapy.model.errors import reject
from koalapy.model.field import out_of_bounds
from koalapy.model.job import JobSpec
from koalapy.validation.limits import Limits


def check_fields(spec: JobSpec, limits: Limits) -> None:
    """Numbers are within the bounds that their fields state, and patterns of results lead out of no folder."""
    for field, value, problem, way_out in out_of_bounds(spec):
        reject(field, value, problem, way_out)
    for index, pattern in enumerate(spec.collect):
        problem = ""
        if not pattern or not pattern.isprintable():
            problem = "which names no files"
        elif pattern.startswith("/"):
            problem = "which is not below the component's folder"
        elif ".." in pattern.split("/"):
            problem = "which leads out of the component's folder"
        if problem:
            hint = "give a pattern of files below the folder, as out/*.csv or **/*.log"
            reject(f"collect[{index}]", pattern, f"is {pattern!r}, {problem}", hint)
