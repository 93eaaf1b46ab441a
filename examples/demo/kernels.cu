// The filters of the demo for the GPU. filters-host.js holds the same arithmetic in JavaScript.
// Planes are row-major, width * height, colours in 0..1. The last two parameters of an image kernel are always width and height.

#define PIXEL                                                  \
  const int x = blockIdx.x * blockDim.x + threadIdx.x;         \
  const int y = blockIdx.y * blockDim.y + threadIdx.y;         \
  if (x >= width || y >= height) return;                       \
  const long long at = (long long)y * width + x

__device__ int clampi(int value, int limit) { return min(max(value, 0), limit - 1); }
__device__ float saturate(float value) { return fminf(fmaxf(value, 0.0f), 1.0f); }
__device__ unsigned char to_byte(float value) { return (unsigned char)(saturate(value) * 255.0f + 0.5f); }

// base, step_x and step_y walk the decoded bytes in the picture's upright orientation.
extern "C" __global__ void unpack(const unsigned char* rgba, long long base, long long step_x, long long step_y,
                                  float* red, float* green, float* blue, unsigned char* luma, int width, int height) {
  PIXEL;
  const unsigned char* pixel = rgba + base + x * step_x + y * step_y;
  red[at] = pixel[0] / 255.0f;
  green[at] = pixel[1] / 255.0f;
  blue[at] = pixel[2] / 255.0f;
  luma[at] = (unsigned char)((77 * pixel[0] + 150 * pixel[1] + 29 * pixel[2] + 128) >> 8);
}

// Counts in shared memory first: one global add per block and bin, not one per pixel.
extern "C" __global__ void histogram(const unsigned char* luma, unsigned int* bins, int width, int height) {
  __shared__ unsigned int counts[256];
  const int lane = threadIdx.y * blockDim.x + threadIdx.x;
  const int lanes = blockDim.x * blockDim.y;
  for (int bin = lane; bin < 256; bin += lanes) counts[bin] = 0;
  __syncthreads();
  const int x = blockIdx.x * blockDim.x + threadIdx.x;
  const int y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < width && y < height) atomicAdd(&counts[luma[(long long)y * width + x]], 1u);
  __syncthreads();
  for (int bin = lane; bin < 256; bin += lanes) {
    if (counts[bin]) atomicAdd(&bins[bin], counts[bin]);
  }
}

// One block of 256 threads: thread i sums the bins up to i.
extern "C" __global__ void equalise(const unsigned int* bins, float* curve, unsigned int pixels) {
  const int level = threadIdx.x;
  if (level >= 256) return;
  unsigned int below = 0, darkest = 0;
  for (int bin = 0; bin < 256; bin++) {
    if (!darkest) darkest = bins[bin];
    if (bin <= level) below += bins[bin];
  }
  curve[level] = pixels > darkest && below > darkest ? (float)(below - darkest) / (float)(pixels - darkest) : 0.0f;
}

extern "C" __global__ void tone(const unsigned char* luma, const float* curve, float* out, float amount, int width, int height) {
  PIXEL;
  const float plain = luma[at] / 255.0f;
  out[at] = plain + amount * (curve[luma[at]] - plain);
}

extern "C" __global__ void blur_rows(const float* in, float* out, const float* weights, int radius, int width, int height) {
  PIXEL;
  float sum = 0.0f;
  for (int tap = -radius; tap <= radius; tap++) sum += weights[tap + radius] * in[(long long)y * width + clampi(x + tap, width)];
  out[at] = sum;
}

extern "C" __global__ void blur_columns(const float* in, float* out, const float* weights, int radius, int width, int height) {
  PIXEL;
  float sum = 0.0f;
  for (int tap = -radius; tap <= radius; tap++) sum += weights[tap + radius] * in[(long long)clampi(y + tap, height) * width + x];
  out[at] = sum;
}

extern "C" __global__ void sobel(const float* in, float* out, int width, int height) {
  PIXEL;
  const float* above = in + (long long)clampi(y - 1, height) * width;
  const float* here = in + (long long)y * width;
  const float* under = in + (long long)clampi(y + 1, height) * width;
  const int left = clampi(x - 1, width), right = clampi(x + 1, width);
  const float across = above[right] + 2.0f * here[right] + under[right] - above[left] - 2.0f * here[left] - under[left];
  const float down = under[left] + 2.0f * under[x] + under[right] - above[left] - 2.0f * above[x] - above[right];
  out[at] = sqrtf(across * across + down * down);
}

__device__ float ink_and_wash(float colour, float washed, float grey, float gain, float keep, const float* look) {
  const float base = washed + look[0] * (colour - washed);
  return (grey + look[1] * (base - grey)) * gain * keep;
}

// look: detail kept, saturation, lightest and heaviest edge, strength of the ink.
extern "C" __global__ void composite(const float* red, const float* green, const float* blue, const float* washed_red,
                                     const float* washed_green, const float* washed_blue, const unsigned char* luma,
                                     const float* tones, const float* edges, const float* look, unsigned char* out,
                                     int width, int height) {
  PIXEL;
  const float grey = 0.299f * washed_red[at] + 0.587f * washed_green[at] + 0.114f * washed_blue[at];
  const float gain = fminf(fmaxf((tones[at] + 0.05f) / (luma[at] / 255.0f + 0.05f), 0.6f), 1.8f);
  const float step = saturate((edges[at] - look[2]) / (look[3] - look[2]));
  const float keep = 1.0f - look[4] * step * step * (3.0f - 2.0f * step);
  unsigned char* pixel = out + 4 * at;
  pixel[0] = to_byte(ink_and_wash(red[at], washed_red[at], grey, gain, keep, look));
  pixel[1] = to_byte(ink_and_wash(green[at], washed_green[at], grey, gain, keep, look));
  pixel[2] = to_byte(ink_and_wash(blue[at], washed_blue[at], grey, gain, keep, look));
  pixel[3] = 255;
}

// The two pictures side by side on white, `gap` pixels apart. A thread writes one pixel of each.
extern "C" __global__ void mount(const unsigned char* rgba, long long base, long long step_x, long long step_y,
                                 const unsigned char* after, unsigned char* sheet, int gap, int width, int height) {
  PIXEL;
  const long long row = (long long)y * (2 * width + gap);
  const unsigned char* from = rgba + base + x * step_x + y * step_y;
  unsigned char* left = sheet + 4 * (row + x);
  unsigned char* right = sheet + 4 * (row + width + gap + x);
  for (int channel = 0; channel < 3; channel++) {
    left[channel] = from[channel];
    right[channel] = after[4 * at + channel];
  }
  left[3] = right[3] = 255;
  for (int column = x; column < gap; column += width) {
    for (int channel = 0; channel < 4; channel++) sheet[4 * (row + width + column) + channel] = 255;
  }
}
