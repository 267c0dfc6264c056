#!/usr/bin/env bash
# Builds deploy/Dockerfile and talks with what it makes: not as root, with files that cannot be written. Says its size.
# With Docker or Podman; else, as root, with Buildah (and, where no registry is reached, on a Debian of debootstrap).
# Without any of them it says so, and tries nothing. LLAMA_CPP=no: without llama.cpp. CERTIFICATES=FOLDER gives the build other authorities than its own.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMNI_WS_API_KEY=${RANDOM}${RANDOM}${RANDOM}
port=${IMAGE_PORT:-18088}
llama_cpp=${LLAMA_CPP:-yes}
limit_mb=850
[ "$llama_cpp" = yes ] || limit_mb=700
work=$(mktemp -d)
running=
clean() { [ -z "$running" ] || eval "$running" >/dev/null 2>&1 || :; rm -rf "$work"; }
trap clean EXIT

with_engine() {
  "$1" build --quiet --build-arg LLAMA_CPP="$llama_cpp" --file deploy/Dockerfile --tag omni-ws:release-check . >/dev/null
  "$1" run --detach --name omni-ws-release-check --read-only --tmpfs /tmp --publish "127.0.0.1:$port:8080" \
    --env OMNI_WS_API_KEY omni-ws:release-check >/dev/null
  running="$1 rm --force omni-ws-release-check"
  size=$("$1" image inspect --format '{{.Size}}' omni-ws:release-check)
}

# The image is mounted without its right to write, and entered: its server has the network of this machine.
with_buildah() {
  local base=debian:trixie-slim root made
  if ! buildah pull --quiet docker.io/library/$base >/dev/null 2>&1; then
    command -v debootstrap >/dev/null || { echo 'the image was not built: no registry, and no debootstrap'; exit 0; }
    base=localhost/debian:trixie-slim
    if [ -z "$(buildah images --quiet $base 2>/dev/null)" ]; then
      echo 'no registry is reached: the image stands on a Debian of debootstrap'
      # With certificates laid over its own, no package can write there.
      debootstrap --variant=minbase ${CERTIFICATES:+--include=ca-certificates} trixie "$work/debian" >"$work/log" || { tail "$work/log" >&2; exit 1; }
      rm -rf "$work"/debian/usr/share/{doc,man,locale,info}/* "$work"/debian/var/{cache/apt,lib/apt/lists,log}/*
      made=$(buildah from scratch)
      buildah add "$made" "$work/debian" / >/dev/null
      buildah config --cmd /bin/sh --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$made"
      buildah commit --quiet "$made" $base >/dev/null
      buildah rm "$made" >/dev/null
      rm -rf "$work/debian"
    fi
  fi
  buildah bud --isolation chroot --build-arg BASE=$base --build-arg LLAMA_CPP="$llama_cpp" ${CERTIFICATES:+--volume "$CERTIFICATES:/etc/ssl/certs:ro"} \
    --file deploy/Dockerfile --tag omni-ws:release-check . >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
  made=$(buildah from localhost/omni-ws:release-check)
  root=$(buildah mount "$made")
  size=$(du --apparent-size --bytes --summarize "$root" | cut -f 1)
  # In a namespace of its own, which ends with it: unshare passes no signal on.
  unshare --mount --pid --fork --kill-child bash -c 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" &&
    mount -t tmpfs tmpfs "$1/tmp" && mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" &&
    exec chroot --userspec=10001:10001 "$1" /usr/bin/env -i PATH=/opt/omni-ws/bin:/usr/bin:/bin \
    XDG_CACHE_HOME=/var/cache/omni_ws PYTHONDONTWRITEBYTECODE=1 OMNI_WS_API_KEY="$OMNI_WS_API_KEY" omni-ws serve --port "$2"' \
    enter "$root" "$port" >"$work/server.log" 2>&1 &
  running="kill \$(pgrep -P $!); wait $!; buildah umount $made; buildah rm $made"
}

if command -v docker >/dev/null && docker info >/dev/null 2>&1; then with_engine docker
elif command -v podman >/dev/null; then with_engine podman
elif command -v buildah >/dev/null && [ "$(id -u)" = 0 ]; then with_buildah
else echo 'the image was not built: none of Docker, Podman and Buildah is here'; exit 0; fi

[ "$size" -le $((limit_mb * 1000000)) ] || { echo "the image has $size bytes, more than $limit_mb MB" >&2; exit 1; }
url=http://127.0.0.1:$port
for _ in $(seq 120); do ! curl -fs "$url/health" >/dev/null || break; sleep 1; done
curl -fsS -H "Authorization: Bearer $OMNI_WS_API_KEY" "$url/v1/audio/speech" -d '{"input":"Good morning."}' -o "$work/said.mp3" || {
  cat "$work/server.log" >&2 2>/dev/null || :; exit 1; }
heard=$(curl -fsS -H "Authorization: Bearer $OMNI_WS_API_KEY" "$url/v1/audio/transcriptions" -F file=@tests/data/goforward.wav)
[[ $heard == *orward* ]] || { echo "the image heard $heard" >&2; exit 1; }
echo "the image: $((size / 1000000)) MB unpacked, read-only and not as root; it spoke $(stat -c %s "$work/said.mp3") bytes, and heard $heard"
