#!/bin/sh
# The integration tests drive a real OpenSSH sshd on loopback; make sure that there is one.
[ -x /usr/sbin/sshd ] && exit 0
echo "== installing openssh-server"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need /usr/sbin/sshd. Install the package openssh-server and run again." >&2
    exit 1
fi
# policy-rc.d keeps the package from starting a server of its own.
policy=/usr/sbin/policy-rc.d
made=""
[ -e $policy ] || {
    made=yes
    printf '#!/bin/sh\nexit 101\n' >$policy && chmod 755 $policy
}
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server >/dev/null
status=$?
[ -z "$made" ] || rm -f $policy
exit $status
