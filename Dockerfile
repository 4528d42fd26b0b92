# docker build -t mbx .                              for the CPU
# docker build -t mbx --build-arg DEVICE=cuda .      for NVIDIA (the driver is the host's)
# docker run --rm -v $PWD/runs:/mbx/runs mbx train --config=tdmpc --workdir=runs/a
FROM python:3.11-slim-bookworm

ARG DEVICE=cpu
# libegl1 and libosmesa6: pictures of MuJoCo's tasks without a screen; git: which commit a run is of.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libegl1 libgl1 libosmesa6 \
    && rm -rf /var/lib/apt/lists/*
ENV MUJOCO_GL=egl PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /mbx
COPY . .
RUN case "$DEVICE" in \
        cpu) extras="" ;; \
        cuda) extras="[cuda]" ;; \
        *) echo "DEVICE=$DEVICE: choose cpu or cuda" >&2; exit 1 ;; \
    esac \
    && pip install -c constraints.txt -e ".$extras"

ENTRYPOINT ["mbx"]
CMD ["--help"]
