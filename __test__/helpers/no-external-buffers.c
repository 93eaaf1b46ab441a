// A runtime that forbids external buffers, made of any Node: preloaded, it answers for the engine as Electron does while the environment
// variable EXTERNAL_BUFFERS is `banned`, which a program may change as it runs. The addon looks the engine's functions up by name.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { napi_no_external_buffers_allowed = 22 };

typedef int create_buffer(void *env, void *data, size_t length, void *finalize, void *hint, void **result);
typedef void *look_up(void *handle, const char *name);

static create_buffer *engine;

static int create(void *env, void *data, size_t length, void *finalize, void *hint, void **result) {
  const char *mode = getenv("EXTERNAL_BUFFERS");
  if (mode != NULL && strcmp(mode, "banned") == 0) return napi_no_external_buffers_allowed;
  return engine(env, data, length, finalize, hint, result);
}

void *dlsym(void *handle, const char *name) {
  // glibc has had dlsym under the first of these names since it moved there from libdl, and under the others before.
  static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
  static look_up *real;
  for (size_t i = 0; real == NULL && i < sizeof versions / sizeof *versions; i++)
    real = (look_up *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  void *found = real == NULL ? NULL : real(handle, name);
  if (found == NULL || strcmp(name, "napi_create_external_arraybuffer") != 0) return found;
  engine = (create_buffer *)found;
  return (void *)create;
}
