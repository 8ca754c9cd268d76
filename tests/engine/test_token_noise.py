import torch
from scipy import stats

from ragaccel.engine import TokenNoise, position_keys

ANCHOR_KEYS = (2252048671, 1275772239)
ANCHOR_NOISE = [
    [0.6372760438108611, 3.5615114137767887, -0.604797598480974, -0.6274647581712964],
    [1.046628449767002, 3.5703240043075106, 2.5140232102009255, -0.16274645729868675],
]
CPU = torch.device("cpu")


def test_the_noise_never_changes():
    """Fixed values: a seed gives the same text in every release and on every machine."""
    noise = TokenNoise(4, CPU).gumbel(7, [0, 12345])
    assert position_keys(7, 0) == ANCHOR_KEYS
    assert torch.allclose(noise, torch.tensor(ANCHOR_NOISE, dtype=torch.float64), atol=1e-12)


def test_it_depends_on_seed_position_and_token_alone():
    wide, narrow = TokenNoise(1000, CPU), TokenNoise(100, CPU)
    whole = wide.gumbel(3, range(50))
    assert torch.equal(whole[20:21], wide.gumbel(3, [20]))
    assert torch.equal(whole[:, :100], narrow.gumbel(3, range(50)))
    assert not torch.equal(whole, wide.gumbel(4, range(50)))
    assert torch.equal(wide.gumbel(-1, [5]), wide.gumbel(2**64 - 1, [5]))


def test_it_is_gumbel_distributed_over_tokens_and_over_positions():
    noise = TokenNoise(2000, CPU).gumbel(11, range(200))
    for sample in (noise[0], noise[:, 0], noise[17], noise[:, 1999], noise.flatten()[::7]):
        assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-4
    assert noise.isfinite().all()


def test_neighbouring_positions_and_seeds_share_nothing():
    noise = TokenNoise(5000, CPU)
    rows = torch.cat([noise.gumbel(seed, range(20)) for seed in range(5)])
    correlation = torch.corrcoef(rows) - torch.eye(len(rows), dtype=rows.dtype)
    assert correlation.abs().max() < 0.08
