"""What is wrong with a request in itself, whatever clusters are like."""

from koalapy.model.cluster import check_cluster
from koalapy.model.errors import reject
from koalapy.model.job import JobSpec
from koalapy.model.request import FlexibleRequest, NonFixedRequest
from koalapy.validation.limits import Limits


def check_components(spec: JobSpec, limits: Limits) -> None:
    """There are some; of a fixed request each names a cluster that there is, of a non-fixed one none does."""
    if isinstance(spec.request, FlexibleRequest):
        return
    if not spec.request.components:
        reject("request.components", [], "is empty", "give at least one component")
    known = [cluster.name for cluster in limits.clusters]
    for index, component in enumerate(spec.request.components):
        field, name = f"request.components[{index}].cluster", component.cluster
        if isinstance(spec.request, NonFixedRequest):
            if name is not None:
                hint = "leave it out, or make the request fixed"
                reject(field, name, f"is {name}, but the request is nonfixed", hint)
        elif not name:
            reject(field, name, "is missing", "a fixed request names the cluster of each component")
        else:
            check_cluster(name, known, field)


def check_flexible(spec: JobSpec, limits: Limits) -> None:
    """The bounds of a flexible request agree with each other, and so does each way to split it."""
    request = spec.request
    if not isinstance(request, FlexibleRequest):
        return
    total, least, most = request.total_size, request.min_component_size, request.max_components
    if least > total:
        problem = f"is {least}, more than the total_size of {total}"
        reject("request.min_component_size", least, problem, f"give at most {total}")
    for index, option in enumerate(request.split_options):
        field, value = f"request.split_options[{index}]", list(option)
        if not option:
            reject(field, value, "is empty", "give the sizes of its components")
        if sum(option) != total:
            hint = "make its sizes sum to the total_size"
            reject(field, value, f"sums to {sum(option)}, but total_size is {total}", hint)
        if min(option) < least:
            problem = f"has a component of {min(option)}, but min_component_size is {least}"
            reject(field, value, problem, "leave out one of the two")
        if most is not None and len(option) > most:
            problem = f"has {len(option)} components, but max_components is {most}"
            reject(field, value, problem, "leave out one of the two")
