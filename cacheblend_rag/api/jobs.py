"""Jobs over HTTP: what an engine in another process has this server's store and model do."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from cacheblend_rag.api.documents import lending
from cacheblend_rag.api.errors import OneLineRoute
from cacheblend_rag.api.gate import ClientGoneError, while_connected
from cacheblend_rag.api.serving import CLIENT_GONE
from cacheblend_rag.engines.embedded_jobs import carry_out
from cacheblend_rag.engines.vllm.middleware.access import GRANT
from cacheblend_rag.engines.vllm.middleware.keys import JOBS, lacks_store_key
from cacheblend_rag.engines.vllm.protocol.job import CHANGES, PARAMETER, read_job
from cacheblend_rag.engines.vllm.protocol.result import params_of

jobs_router = APIRouter(route_class=OneLineRoute, tags=["documents"])


@jobs_router.post(JOBS)
async def post_job(request: Request) -> Response:
    """Do a job that an engine in another process sends; it is cancelled if that disconnects."""
    job = await asyncio.to_thread(read_job, await request.body())
    granted = request.scope.get(GRANT)
    if job.kind in CHANGES and not (granted and granted.may_change):
        raise lacks_store_key(job.kind)
    async with lending(request).lent_for_a_job(request) as engine:
        try:
            result = await while_connected(request, carry_out(engine, job))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
    return JSONResponse(params_of(result)[PARAMETER])
