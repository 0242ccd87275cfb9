"""Every name of vLLM that this package uses, held against vLLM's sources without running them.

`python -m tests.engines.vllm.source_contract PLACE` checks a release: PLACE is a wheel, a source
archive, an unpacked folder, or a version such as ``0.33.0``, which is fetched by pip. Without
PLACE, the installed vLLM is checked. The tests check the installed one, and that nothing that the
package uses is missing here.

vLLM is not imported, so that a build for GPUs can be checked where there is none: sources are read
by ``ast``. A name may be imported from elsewhere in vLLM, a member inherited.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.engines.vllm.release_sources import Name, broken, fields, installed, sources_at

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
ATTENTION = Name(
    members={"forward": ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")}
)
WRITING = Name(
    members={
        **ATTENTION.members,
        "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
        **fields("scale"),
    }
)
"""The backends that were looked at: each writes KV into its own layout."""

CONTRACT: dict[str, dict[str, Name]] = {
    "vllm": {"__version__": Name(), "SamplingParams": Name()},
    "vllm.sampling_params": {
        "SamplingParams": Name(
            (
                "max_tokens",
                "temperature",
                "top_k",
                "top_p",
                "stop",
                "seed",
                "repetition_penalty",
                "ignore_eos",
                "min_p",
                "output_kind",
                "extra_args",
                "prompt_logprobs",
                "logprobs",
                "presence_penalty",
                "frequency_penalty",
                "structured_outputs",
            )
        ),
        "StructuredOutputsParams": Name(("json", "regex", "choice", "grammar", "json_object")),
        "RequestOutputKind": Name(members=fields("DELTA")),
    },
    "vllm.exceptions": {"VLLMClientError": Name(since={"": "0.27"})},
    "vllm.outputs": {
        "RequestOutput": Name(members=fields("outputs", "kv_transfer_params")),
        "CompletionOutput": Name(
            members=fields("text", "token_ids", "finish_reason", "stop_reason", "logprobs")
        ),
    },
    "vllm.config": {
        "VllmConfig": Name(
            members=fields(
                "model_config",
                "parallel_config",
                "cache_config",
                "scheduler_config",
                "device_config",
                "compilation_config",
                "kv_transfer_config",
                "lora_config",
                "speculative_config",
            )
        ),
        "KVTransferConfig": Name(
            (
                "kv_connector",
                "kv_connector_module_path",
                "kv_role",
                "kv_load_failure_policy",
                "kv_connector_extra_config",
            )
        ),
        "ModelConfig": Name(
            members=fields(
                "model",
                "dtype",
                "revision",
                "hf_config",
                "max_model_len",
                "uses_mrope",
                "use_mla",
                "is_moe",
                "get_vocab_size",
                "get_hidden_size",
                "generation_config",
                "override_generation_config",
                "try_get_generation_config",
            )
        ),
        "ParallelConfig": Name(
            members=fields(
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
                "data_parallel_size",
                "tensor_parallel_size",
            )
        ),
        "CacheConfig": Name(members=fields("cache_dtype", "block_size")),
        "SchedulerConfig": Name(members=fields("max_num_batched_tokens", "max_num_seqs")),
        "DeviceConfig": Name(members=fields("device", "device_type")),
        "CompilationConfig": Name(members=fields("static_forward_context")),
        "set_current_vllm_config": Name(("vllm_config",)),
    },
    "vllm.engine.arg_utils": {
        "AsyncEngineArgs": Name(
            (
                "model",
                "dtype",
                "kv_transfer_config",
                "gpu_memory_utilization",
                "data_parallel_size",
                "max_model_len",
                "tensor_parallel_size",
            )
        )
    },
    "vllm.entrypoints.openai.api_server": {},
    "vllm.plugins.endpoint_plugins.interface": {
        "EndpointPlugin": Name(
            members={
                "attach_router": ("app",),
                "init_state": ("engine_client", "state", "args"),
                **fields("name", "required_tasks"),
            }
        )
    },
    "vllm.v1.engine.async_llm": {
        "AsyncLLM": Name(
            members={
                "from_engine_args": ("engine_args",),
                "generate": (
                    *("prompt", "sampling_params", "request_id", "data_parallel_rank"),
                    "trace_headers",
                ),
                **fields("shutdown", "model_config", "vllm_config", "engine_core"),
            }
        )
    },
    "vllm.v1.engine.core_client": {
        "EngineCoreClient": Name(members={"add_request_async": ("request",)})
    },
    "vllm.v1.engine.exceptions": {"EngineDeadError": Name()},
    f"{CONNECTOR}.base": {
        "KVConnectorRole": Name(members=fields("SCHEDULER", "WORKER")),
        "KVConnectorMetadata": Name(),
        "KVConnectorTransferResults": Name(members=fields("failed_recving"), since={"": "0.30"}),
        "SupportsHMA": Name(members={"request_finished_all_groups": ("request", "block_ids")}),
        "KVConnectorWorkerMetadata": Name(members={"aggregate": ("other",)}),
        "KVConnectorBase_V1": Name(
            ("vllm_config", "role", "kv_cache_config"),
            {
                "__init__": ("vllm_config", "role", "kv_cache_config"),
                "register_kv_caches": ("kv_caches",),
                "bind_connector_metadata": ("connector_metadata",),
                "start_load_kv": ("forward_context",),
                "wait_for_layer_load": ("layer_name",),
                "get_finished": ("finished_req_ids",),
                "get_transfer_results": ("finished_req_ids",),
                "on_new_request": ("request",),
                "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
                "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
                "build_connector_meta": ("scheduler_output",),
                "update_connector_output": ("connector_output",),
                "request_finished": ("request", "block_ids"),
                "build_kv_connector_stats": ("data",),
                "build_prom_metrics": (
                    "vllm_config",
                    "metric_types",
                    "labelnames",
                    "per_engine_labelvalues",
                ),
                **fields(
                    "reset_cache",
                    "shutdown",
                    "requires_kv_delivery",
                    "save_kv_layer",
                    "wait_for_save",
                    "get_block_ids_with_load_errors",
                    "build_connector_worker_meta",
                    "get_kv_connector_stats",
                    "_get_connector_metadata",
                ),
            },
            since={"get_transfer_results": "0.30", "requires_kv_delivery": "0.27"},
        ),
    },
    f"{CONNECTOR}.metrics": {
        "KVConnectorStats": Name(
            members={"aggregate": ("other",), **fields("data", "reset", "reduce", "is_empty")}
        ),
        "KVConnectorPromMetrics": Name(
            ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
            {
                "__init__": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
                "observe": ("transfer_stats_data", "engine_idx"),
                **fields("per_engine_labelvalues"),
            },
        ),
    },
    "vllm.v1.core.kv_cache_manager": {"KVCacheBlocks": Name(members=fields("get_block_ids"))},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": Name(
            members=fields(
                "total_num_scheduled_tokens",
                "num_scheduled_tokens",
                "scheduled_cached_reqs",
                "scheduled_new_reqs",
            )
        ),
        "NewRequestData": Name(members=fields("req_id", "num_computed_tokens")),
        "CachedRequestData": Name(members=fields("req_ids", "num_computed_tokens")),
    },
    "vllm.v1.outputs": {"KVConnectorOutput": Name(members=fields("kv_connector_worker_meta"))},
    "vllm.v1.request": {
        "Request": Name(
            members=fields(
                "request_id",
                "max_tokens",
                "kv_transfer_params",
                "sampling_params",
                "num_prompt_tokens",
                "num_preemptions",
                "prompt_token_ids",
                "cache_salt",
                "arrival_time",
                "lora_request",
                "mm_features",
                "prompt_embeds",
                "block_hashes",
                "update_block_hashes",
                "sampling_params",
                "skip_reading_prefix_cache",
                "resumable",
                "trace_headers",
                "prefill_stats",
                "status",
            )
        ),
        "RequestStatus": Name(members=fields("WAITING_FOR_REMOTE_KVS")),
    },
    "vllm.v1.metrics.stats": {
        "PrefillStats": Name(
            members={
                "set": (
                    *("num_prompt_tokens", "num_local_cached_tokens"),
                    "num_external_cached_tokens",
                ),
                **fields("num_prompt_tokens", "num_local_cached_tokens"),
            }
        )
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": Name(members=fields("kv_cache_groups", "num_blocks")),
        "KVCacheGroupSpec": Name(members=fields("kv_cache_spec", "layer_names")),
        "KVCacheSpec": Name(
            members={"copy_with_new_block_size": ("block_size",), **fields("block_size")}
        ),
        "FullAttentionSpec": Name(),
        "SlidingWindowSpec": Name(members=fields("sliding_window")),
        "UniformTypeKVCacheSpecs": Name(members=fields("kv_cache_specs")),
    },
    "vllm.v1.attention.backend": {
        "AttentionBackend": Name(members=fields("get_builder_cls")),
        "AttentionMetadataBuilder": Name(
            ("kv_cache_spec", "layer_names", "vllm_config", "device"),
            {"build": ("common_prefix_len", "common_attn_metadata", "fast_build")},
        ),
        "AttentionImpl": ATTENTION,
        "CommonAttentionMetadata": Name(
            (
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "seq_lens_cpu_upper_bound",
                "num_reqs",
                "num_actual_tokens",
                "max_query_len",
                "max_seq_len",
                "block_table_tensor",
                "slot_mapping",
            )
        ),
    },
    "vllm.v1.attention.backends.cpu_attn": {"CPUAttentionBackendImpl": WRITING},
    "vllm.v1.attention.backends.flash_attn": {"FlashAttentionImpl": WRITING},
    "vllm.v1.attention.backends.flashinfer": {
        "FlashInferImpl": WRITING,
        "FlashInferMetadataBuilder": Name(
            members={
                "set_workspace_buffer": ("workspace_buffer",),
                **fields("_get_workspace_buffer"),
            }
        ),
    },
    "vllm.v1.attention.backends.triton_attn": {"TritonAttentionImpl": WRITING},
    "vllm.v1.worker.utils": {
        "select_common_block_size": Name(
            ("kv_manager_block_size", "backends"), later=("kv_cache_specs",)
        )
    },
    "vllm.distributed.parallel_state": {
        "GroupCoordinator": Name(
            members=fields("world_size", "first_rank", "is_first_rank", "cpu_group", "device_group")
        ),
        "get_tensor_model_parallel_rank": Name(),
        "get_tp_group": Name(),
    },
    "vllm.forward_context": {
        "ForwardContext": Name(
            ("no_compile_layers", "all_moe_layers", "skip_compiled"),
            fields("no_compile_layers", "all_moe_layers", "skip_compiled"),
        ),
        "get_forward_context": Name(),
        "override_forward_context": Name(("forward_context",)),
        "set_forward_context": Name(
            ("attn_metadata", "vllm_config", "slot_mapping", "skip_compiled")
        ),
    },
    "vllm.model_executor.custom_op": {
        "CustomOp": Name(
            members={
                "maybe_compile": ("fn",),
                **fields("enabled", "forward_native", "_forward_method"),
            }
        )
    },
    "vllm.model_executor.layers.attention.attention": {
        "Attention": Name(
            members=fields(
                "layer_name",
                "impl",
                "kv_cache",
                "num_heads",
                "num_kv_heads",
                "head_size",
                "head_size_v",
                "attn_type",
                "attn_backend",
                "kv_sharing_target_layer_name",
                "sliding_window",
                "query_quant",
                "get_kv_cache_spec",
            )
        )
    },
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": {
        "MoERunner": Name(members=fields("_forward_entry", "_forward_impl"))
    },
    "vllm.model_executor.layers.linear": {
        "ColumnParallelLinear": Name(
            members=fields("input_size_per_partition", "output_size_per_partition")
        ),
        "ReplicatedLinear": Name(members=fields("input_size", "output_size")),
    },
    "vllm.model_executor.layers.rotary_embedding.base": {
        "RotaryEmbedding": Name(members=fields("_compute_cos_sin_cache"))
    },
    "vllm.model_executor.models.interfaces_base": {
        "VllmModel": Name(
            members={"embed_input_ids": ("input_ids",), "forward": ("input_ids", "positions")}
        )
    },
}


# The command


def fetched(version: str, folder: Path) -> Path:
    """Have pip fetch a release's wheel, which is hundreds of megabytes."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    return next(folder.iterdir())


def main() -> None:
    """Check a release, and say what differs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("place", nargs="?", help="a wheel, an archive, a folder or a version")
    place = parser.parse_args().place
    with tempfile.TemporaryDirectory() as folder:
        if place is None:
            where = installed()
        elif Path(place).exists():
            where = Path(place)
        elif re.fullmatch(r"\d[\w.]*", place):
            where = fetched(place, Path(folder))
        else:
            raise SystemExit(f"{place}: no such file or folder, and no version")
        lines = broken(sources_at(where), CONTRACT)
    names = sum(map(len, CONTRACT.values()))
    print("\n".join(lines) or f"{where.name}: all of {len(CONTRACT)} modules, {names} names agree")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
