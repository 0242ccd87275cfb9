# vLLM's own image with cacheblend-rag in it. In the checkout's folder:
#   docker build -f examples/docker/vllm.Dockerfile -t cacheblend-rag:vllm .
ARG VLLM_VERSION=0.32.0
FROM vllm/vllm-openai:v${VLLM_VERSION}
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY cacheblend_rag cacheblend_rag
# What vLLM has installed stays as it is: pip ends with an error where it would not do.
RUN python3 -m pip freeze > installed.txt \
    && python3 -m pip install --no-cache-dir -c installed.txt '.[vllm-server,metrics,redis,object-store]'
WORKDIR /
VOLUME ["/kv"]
EXPOSE 8000
ENTRYPOINT ["cacheblend-rag", "serve", "--engine", "vllm"]
CMD ["Qwen/Qwen2.5-7B-Instruct", "--host", "0.0.0.0", "--kv-path", "/kv"]
