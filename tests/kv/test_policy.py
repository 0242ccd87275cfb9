"""TierPolicy: what is out of range is named, and tiers take it in place of a capacity."""

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, HostTier, RedisTier, TierPolicy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes=-1 must be at least 0"),
        ({"ttl_seconds": 0}, "ttl_seconds=0 must be above 0"),
        ({"timeout_seconds": -2}, "timeout_seconds=-2 must be above 0"),
        ({"ttl_seconds": float("nan")}, "ttl_seconds=nan must be above 0"),
        ({"write": "later"}, "write='later' must be one of through, none"),
        ({"admit": "lru"}, "admit='lru' must be one of frequency, always"),
    ],
)
def test_what_is_out_of_range_is_named(options, message):
    with pytest.raises(StoreError, match=f"^{message}$"):
        TierPolicy(**options)


def test_a_tier_takes_a_policy_in_place_of_a_capacity(tmp_path):
    policy = TierPolicy(capacity_bytes=7, write="none", promote=False)
    for tier in (HostTier(policy=policy), DiskTier(tmp_path, policy=policy)):
        assert (tier.policy, tier.capacity_bytes) == (policy, 7)
        assert not tier.keeps_found
        assert not tier.takes_puts
    assert HostTier(7).policy == TierPolicy(7)
    with pytest.raises(StoreError, match="both set the capacity"):
        HostTier(7, policy=policy)
    with pytest.raises(StoreError, match=r"^the redis tier takes no capacity: its server has"):
        RedisTier(policy=policy)
