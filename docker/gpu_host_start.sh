#!/bin/sh
# Make the host key at the first start, hand out its public half, and serve.
set -eu
umask 077
key=/var/lib/eagle3-ssh/host_key
# A key that was cut off while it was made has no public half: it is made again.
[ -s "$key.pub" ] || {
    rm -f "$key"
    ssh-keygen -q -t ed25519 -N "" -C gpu-host -f "$key"
}
cp "$key.pub" /exchange/host/host_key.pub.new
chmod 0644 /exchange/host/host_key.pub.new
mv /exchange/host/host_key.pub.new /exchange/host/host_key.pub
exec /usr/sbin/sshd -D -e -f /opt/eagle3/sshd_config
