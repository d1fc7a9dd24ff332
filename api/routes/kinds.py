"""REST for our two namespaced kinds: the same routes for TrainingJobs and ModelServices.

collection   list everywhere, list in a namespace, create
one          get, change, delete
actions      cancel, resume; scale of a ModelService
findings     logs, events, pods, samples
preview      what would become of a draft
series       load and replicas of a ModelService over time
"""

from fastapi import APIRouter

from busbar.api.routes import actions, collection, drafts, findings, one, schemas, service_series
from busbar.api.routes.served import Served
from busbar.kube.resources import MODEL_SERVICES, TRAINING_JOBS
from busbar.kube.types import ModelService, TrainingJob

SERVED = (
    Served(TRAINING_JOBS, TrainingJob, schemas.TrainingJobList),
    Served(MODEL_SERVICES, ModelService, schemas.ModelServiceList),
)


def router() -> APIRouter:
    """Both kinds."""
    both = APIRouter()
    for kind in SERVED:
        for part in (collection, one, actions, findings):
            both.include_router(part.router(kind))
    both.include_router(actions.scale())
    both.include_router(drafts.router())
    both.include_router(service_series.router())
    return both
