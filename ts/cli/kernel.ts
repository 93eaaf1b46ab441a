/**
 * `fill_f32(float *p, unsigned n, float value)` as PTX text: every driver since CUDA 11 compiles it for its device, so that a
 * kernel can be tried where the CUDA C++ compiler is not installed.
 */
export const FILL_PTX = `
.version 7.0
.target sm_50
.address_size 64

.visible .entry fill_f32(.param .u64 p, .param .u32 n, .param .f32 value)
{
  .reg .pred %outside;
  .reg .b32 %r<5>;
  .reg .b64 %a<4>;
  .reg .f32 %v;
  ld.param.u64 %a0, [p];
  ld.param.u32 %r0, [n];
  ld.param.f32 %v, [value];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %outside, %r4, %r0;
  @%outside ret;
  cvta.to.global.u64 %a1, %a0;
  mul.wide.u32 %a2, %r4, 4;
  add.u64 %a3, %a1, %a2;
  st.global.f32 [%a3], %v;
  ret;
}
`
