"""Real servers for tests, started once a session: Redis, and an S3 endpoint."""

import uuid

import pytest

from cacheblend_rag.bench.servers import redis_server, redis_url, s3_server, s3_url
from cacheblend_rag.kv.tiers.urls import open_tier
from cacheblend_rag.tier_url import TierUrl


@pytest.fixture(scope="session")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3():
    with s3_server() as server:
        yield server


def tier_at(url):
    """The tier that a URL describes."""
    return open_tier(TierUrl(url.rstrip("?&")), "cpu")


def redis_place(server, options=""):
    """A place of its own on a server, as a tier's URL."""
    return redis_url(server, f"prefix={uuid.uuid4().hex}:&{options}")


def s3_place(server, options=""):
    """A place of its own in the bucket, as a tier's URL."""
    return s3_url(server, uuid.uuid4().hex, options)
