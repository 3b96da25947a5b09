/* The card of a microVM that has a network: its addresses and routes, as the daemon put them on the command line, or told a
 * clone when it woke. What it reaches is decided on the host. */
#include "vm.h"

#include <arpa/inet.h>
#include <linux/ipv6.h>
#include <linux/ipv6_route.h>
#include <linux/route.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define CARD "eth0"

enum { LENGTH4 = 31, LENGTH6 = 127 };

struct addresses {
        struct in_addr own4, gateway4;
        bool six;
        struct in6_addr own6, gateway6;
};

static struct addresses current; /* what the card has; of a clone at first: its source's */

static int set(const char *key, const char *value) {
        char path[80];

        snprintf(path, sizeof(path), "/proc/sys/net/ipv6/conf/" CARD "/%s", key);
        int r = write_at(AT_FDCWD, path, value);
        return r == -ENOENT ? 0 : r;
}

static int parse(const char *words, struct addresses *ret) {
        char text[NET_WORDS], *rest = text, *word[4] = { NULL };
        size_t n = 0, size = strlen(words);

        if (size >= sizeof(text))
                return -EINVAL;
        memcpy(text, words, size + 1);
        while (n < ELEMENTS(word) && (word[n] = strsep(&rest, "/")))
                n++;
        if ((n != 2 && n != 4) || rest)
                return -EINVAL;
        *ret = (struct addresses) { .six = n == 4 };
        if (inet_pton(AF_INET, word[0], &ret->own4) != 1 || inet_pton(AF_INET, word[1], &ret->gateway4) != 1)
                return -EINVAL;
        if (ret->six && (inet_pton(AF_INET6, word[2], &ret->own6) != 1 || inet_pton(AF_INET6, word[3], &ret->gateway6) != 1))
                return -EINVAL;
        return 0;
}

static struct sockaddr ip4(struct in_addr address) {
        struct sockaddr_in in = { .sin_family = AF_INET, .sin_addr = address };
        struct sockaddr out;

        memcpy(&out, &in, sizeof(out));
        return out;
}

/* Takes the place of an earlier address, whose routes go with it. Returns the card's index. */
static int set_ip4(const struct addresses *to) {
        struct ifreq request = { .ifr_name = CARD };
        struct rtentry route = { .rt_flags = RTF_UP | RTF_GATEWAY };
        cleanup_fd int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

        request.ifr_addr = ip4(to->own4);
        if (fd < 0 || ioctl(fd, SIOCSIFADDR, &request) < 0)
                return -errno;
        request.ifr_netmask = ip4((struct in_addr) { htonl(~0u << (32 - LENGTH4)) });
        if (ioctl(fd, SIOCSIFNETMASK, &request) < 0 || ioctl(fd, SIOCGIFFLAGS, &request) < 0)
                return -errno;
        request.ifr_flags |= IFF_UP;
        route.rt_dst.sa_family = route.rt_genmask.sa_family = AF_INET;
        route.rt_gateway = ip4(to->gateway4);
        if (ioctl(fd, SIOCSIFFLAGS, &request) < 0 || ioctl(fd, SIOCADDRT, &route) < 0
            || ioctl(fd, SIOCGIFINDEX, &request) < 0)
                return -errno;
        return request.ifr_ifindex;
}

/* from, to: which of them have IPv6 at all. */
static int change_ip6(int card, const struct addresses *from, const struct addresses *to) {
        struct in6_ifreq request = { .ifr6_prefixlen = LENGTH6, .ifr6_ifindex = card };
        struct in6_rtmsg route = { .rtmsg_flags = RTF_UP | RTF_GATEWAY, .rtmsg_metric = 1, .rtmsg_ifindex = card };
        cleanup_fd int fd = -1;

        if (!from->six && !to->six)
                return 0;
        if ((fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0)) < 0)
                return -errno;
        if (from->six) {
                request.ifr6_addr = from->own6;
                route.rtmsg_gateway = from->gateway6;
                if (ioctl(fd, SIOCDELRT, &route) < 0 || ioctl(fd, SIOCDIFADDR, &request) < 0)
                        return -errno;
        }
        if (to->six) {
                request.ifr6_addr = to->own6;
                route.rtmsg_gateway = to->gateway6;
                if (ioctl(fd, SIOCSIFADDR, &request) < 0 || ioctl(fd, SIOCADDRT, &route) < 0)
                        return -errno;
        }
        return 0;
}

int net_change(const char *words) {
        struct addresses to;
        int r, card;

        if ((r = parse(words, &to)) < 0)
                return r;
        if ((card = set_ip4(&to)) < 0)
                return card;
        if ((r = change_ip6(card, &current, &to)) < 0)
                return r;
        current = to;
        return 0;
}

void net_up(const struct boot_plan *plan) {
        int r;

        if (!*plan->net)
                return;
        /* Nobody else is on the link: no address but ours, and no time spent on asking whether it is taken. */
        if ((r = set("accept_dad", "0")) < 0 || (r = set("accept_ra", "0")) < 0 || (r = set("addr_gen_mode", "1")) < 0
            || (r = net_change(plan->net)) < 0)
                boot_fail(r, "dsec.net=%s", plan->net);
}
