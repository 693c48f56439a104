#!/bin/bash
# Plays the programs of Amazon Linux that a build of the machine image calls, by the name it is called by.
# They write down what they were asked, and do to the file system what the real ones would: /fake is their memory.
set -euo pipefail
shopt -s nullglob
name=${0##*/}
echo "$name $*" >>/fake/calls
kernel=$(</fake/kernel)
driver=$(</fake/driver)
modules=/fake/modules/$kernel
[ -d "$modules" ] || mkdir -p "$modules"

# What the repositories hold: name, version-release.
available() {
  local kernel_name=kernel
  [[ $kernel == 6.1.* ]] || kernel_name=kernel$(cut -d. -f1,2 <<<"$kernel")
  printf '%s\n' "$kernel_name-devel $kernel" "$kernel_name-modules-extra $kernel" \
    "dkms 3.1.2-1" "pciutils 3.7.0-4" "nvidia-release 2023-2" "dnf-command(versionlock) 1-1" \
    "lustre-client 2.15.6-1" "amazon-efs-utils 2.4.0-1" "gnupg2-full 2.3.7-1" "gnupg2-minimal 2.3.7-1"
  # As in Amazon Linux, a repository of its own.
  if [ -e /fake/packages/nvidia-release ]; then
    printf '%s\n' "nvidia-container-toolkit 1.18.1-1"
    for each in kmod-nvidia-open-dkms nvidia-driver-cuda nvidia-persistenced nvidia-modprobe; do
      printf '%s\n' "$each 570.86.15-1.amzn2023" "$each $driver-1.amzn2023"
    done
    printf '%s\n' "nvidia-fabric-manager 570.86.15-1" "nvidia-fabricmanager $driver-1"
    # A version of which the other repository has not all parts yet.
    printf '%s\n' "kmod-nvidia-open-dkms 580.200.01-1.amzn2023" "nvidia-modprobe 580.200.01-1.amzn2023"
  fi
}

# The newest package that `$1` names: its name, or a pattern for name-version-release.
find_package() {
  local package version found=""
  while read -r package version; do
    # shellcheck disable=SC2053 # a pattern it is
    if [[ $package == "$1" || $package-$version == $1 ]]; then found="$package $version"; fi
  done < <(available)
  [ -n "$found" ] || { echo "No match for argument: $1" >&2; return 1; }
  echo "$found"
}

# The versions of the packages that the pattern `$1` for name-version names.
query() {
  local package version
  while read -r package version; do
    # shellcheck disable=SC2053 # a pattern it is
    if [[ $package-${version%%-*} == $1 ]]; then echo "${version%%-*}"; fi
  done < <(available)
}

# A library that loads: any will do, under the driver's names.
lay_libraries() {
  local some version=$1 each
  some=$(ldconfig -p | sed -n 's/.*libz\.so\.1 .*=> //p' | head -n 1)
  mkdir -p /usr/lib64
  for each in cuda cudadebugger nvidia-ml nvidia-ptxjitcompiler nvidia-nvvm nvcuvid; do
    cp -L "$some" "/usr/lib64/lib$each.so.$version"
    chmod 755 "/usr/lib64/lib$each.so.$version"
    ln -sf "lib$each.so.$version" "/usr/lib64/lib$each.so.1"
  done
  ln -sf libcuda.so.1 /usr/lib64/libcuda.so
  ln -sf libnvidia-ml.so.1 /usr/lib64/libnvidia-ml.so
}

install() {
  local module
  echo "$2" >"/fake/packages/$1"
  case $1 in
    kmod-nvidia-open-dkms)
      # Compiled for the running kernel, if its headers are there, with what /etc/dkms says.
      [ -n "$(compgen -G '/fake/packages/kernel*-devel')" ] || return 0
      grep -q -- "-j$(nproc)" /etc/dkms/nvidia.conf
      for module in nvidia nvidia-uvm nvidia-modeset; do echo "${2%%-*}" >"$modules/$module"; done
      ;;
    nvidia-driver-cuda)
      lay_libraries "${2%%-*}"
      # shellcheck disable=SC2016 # the program's own variable
      printf '#!/bin/sh\necho "GPU 0: played, with $LD_LIBRARY_PATH"\n' >/usr/bin/nvidia-smi
      printf '#!/bin/sh\n' >/usr/bin/nvidia-cuda-mps-server
      chmod 755 /usr/bin/nvidia-smi
      chmod 4755 /usr/bin/nvidia-cuda-mps-server
      ;;
    nvidia-container-toolkit)
      echo "${2%%-*}" >/fake/toolkit
      touch /usr/lib64/libnvidia-container.so.1.18.1
      ln -sf libnvidia-container.so.1.18.1 /usr/lib64/libnvidia-container.so.1
      ;;
    lustre-client) touch "$modules/lustre" && command install -m 755 /dev/null /usr/sbin/mount.lustre ;;
    amazon-efs-utils) command install -m 755 /dev/null /usr/sbin/mount.efs ;;
  esac
}

play_dnf() {
  local word found=()
  case $1 in
    install)
      for word in "${@:2}"; do
        [ "$word" = -y ] || found+=("$(find_package "$word")")
      done
      # shellcheck disable=SC2086 # name and version
      for word in "${found[@]}"; do install $word; done
      ;;
    list) available | grep "^${*: -1} " ;;
    -q) # repoquery --qf %{version} NAME-VERSION.*
      [ "$2 $3 $4" = 'repoquery --qf %{version}' ] || return 1
      query "$5"
      ;;
    swap) rm "/fake/packages/$3" && touch "/fake/packages/$4" ;;
    versionlock) [ -e '/fake/packages/dnf-command(versionlock)' ] ;;
  esac
}

play_rpm() {
  local package line
  if [ "$1 $2" = "-q --quiet" ]; then
    [ -e "/fake/packages/$3" ]
  elif [ "$1 $2 $3" = "-q --qf %{VERSION}" ]; then
    cut -d- -f1 "/fake/packages/$4"
  else # -qa --qf FORMAT
    for package in /fake/packages/*; do
      line=${3//%\{NAME\}/${package##*/}}
      line=${line//%\{EVR\}/$(cat "$package")}
      line=${line//%\{VERSION\}-%\{RELEASE\}/$(cat "$package")}
      printf '%b' "${line//%\{ARCH\}/x86_64}"
    done
  fi
}

play_systemctl() {
  local unit
  for unit in "${@: -1}"; do
    case $1 in
      is-enabled) [ -e "/fake/enabled/$unit" ] ;;
      is-active) [ -e "/fake/active/$unit" ] ;;
    esac
  done
  for unit in "${@:2}"; do
    case $1 in
      enable) touch "/fake/enabled/$unit" ;;
      disable) rm -f "/fake/enabled/$unit" "/fake/active/$unit" ;;
      stop)
        # The agent saves its state when it ends.
        if [ "$unit" = ecs ] && [ -e /fake/active/ecs ]; then echo x >/var/lib/ecs/data/agent.db; fi
        rm -f "/fake/active/$unit"
        ;;
    esac
  done
}

# AWS's folder with the installer for EFA, which compiles the driver and installs rdma-core.
play_curl() {
  local file=${*: -1}
  case $file in
    https://efa-installer.amazonaws.com/aws-efa-installer-1.*.tar.gz)
      mkdir -p /tmp/efa/aws-efa-installer
      # shellcheck disable=SC2016 # the installer's own variables
      printf '%s\n' '#!/bin/bash' 'set -e' 'echo "efa_installer $*" >>/fake/calls' \
        "echo 3.3.1g >$modules/efa" 'echo 3.3.1-1 >/fake/packages/efa' \
        'echo 65.0-1 >/fake/packages/rdma-core' >/tmp/efa/aws-efa-installer/efa_installer.sh
      chmod 755 /tmp/efa/aws-efa-installer/efa_installer.sh
      tar -C /tmp/efa -czf "$5" aws-efa-installer
      rm -r /tmp/efa
      ;;
    https://efa-installer.amazonaws.com/aws-efa-installer*) echo played >"$5" ;;
    *) return 22 ;;
  esac
}

# Says of signatures what /fake/signer says, as the full gpg of Amazon Linux does.
play_gpg() {
  [ -e /fake/packages/gnupg2-full ] || return 2
  [[ $* != *--verify* ]] || echo "[GNUPG:] VALIDSIG 0123 2026-10-22 $(cat /fake/signer)"
}

case $name in
  dnf) play_dnf "$@" ;;
  rpm) play_rpm "$@" ;;
  systemctl) play_systemctl "$@" ;;
  uname) case $1 in -r) echo "$kernel" ;; -m) cat /fake/machine ;; esac ;;
  modinfo) # -k KERNEL [-F version] MODULE
    cat "/fake/modules/$2/${*: -1}"
    ;;
  modprobe) [ -e "$modules/$1" ] ;;
  nvidia-ctk) printf 'NVIDIA Container Toolkit CLI version %s\ncommit: 0123\n' "$(cat /fake/toolkit)" ;;
  cloud-init) rm -rf /var/lib/cloud/instance* ;;
  lspci) if [ "$*" = "-n -d 1d0f:" ]; then cat /fake/efas; else cat /fake/gpus; fi ;;
  curl) play_curl "$@" ;;
  gpg) play_gpg "$@" ;;
  docker) printf ' Server Version: 25.0.18\n Runtimes: io.containerd.runc.v2 nvidia runc\n' ;;
esac
