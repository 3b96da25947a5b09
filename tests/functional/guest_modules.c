/* /init of a guest that loads /modules in order, says how it went on the console, and powers off. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

static void load(const char *name)
{
	char path[512];
	snprintf(path, sizeof path, "/modules/%s", name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	long failed = fd < 0 || syscall(SYS_finit_module, fd, "", 0);
	printf("module %s %s\n", name, failed ? strerror(errno) : "ok");
	close(fd);
}

int main(void)
{
	struct dirent **found;
	struct utsname names;
	char line[256];

	mkdir("/proc", 0755);
	mkdir("/sys", 0755);
	mount("proc", "/proc", "proc", 0, 0);
	mount("sysfs", "/sys", "sysfs", 0, 0);
	mount("devtmpfs", "/dev", "devtmpfs", 0, 0);
	int count = scandir("/modules", &found, 0, alphasort);
	for (int i = 0; i < count; i++)
		if (found[i]->d_name[0] != '.')
			load(found[i]->d_name);
	FILE *file = fopen("/proc/filesystems", "re");
	while (file && fgets(line, sizeof line, file))
		printf("fs %s", strrchr(line, '\t') + 1);
	static const char *const things[] = {"/dev/pmem0", "/dev/vda", "/dev/vsock", "/dev/vport1p1", "/dev/hwrng", "/sys/kernel/mm/damon"};
	for (size_t i = 0; i < sizeof things / sizeof things[0]; i++)
		if (access(things[i], F_OK) == 0)
			printf("has %s\n", things[i]);
	uname(&names);
	printf("release %s\nend\n", names.release);
	fflush(stdout);
	reboot(RB_POWER_OFF);
}
