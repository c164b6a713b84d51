#!/bin/sh
# The integration tests drive a real OpenSSH sshd on loopback; make sure that there is one.
[ -x /usr/sbin/sshd ] && exit 0
echo "== installing openssh-server"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need /usr/sbin/sshd. Install the package openssh-server and run again." >&2
    exit 1
fi
# policy-rc.d keeps the package from starting a server of its own.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server >/dev/null
status=$?
rm -f /usr/sbin/policy-rc.d
exit $status
